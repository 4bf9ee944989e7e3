"""Public records beside the private ones: their gradient is mixed in after the noise.

An optimizer that scales gradients before they are clipped can take its scales from them, too
(`scaled_momentum`).

The noised gradient is released as it is priced. What follows is post-processing: a gradient of
public records, at weights that were released before, costs nothing. It has no noise, so it steadies
the direction of a noisy step (Amid et al. 2022; Nasr et al. 2023).

The public records are NOT protected. Whoever names a store here declares that nobody whom the
guarantee protects has anything in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from userdp.config.sections import DataSettings
from userdp.data.store import UserStore
from userdp.data.tokens import tokenise
from userdp.errors import InputError
from userdp.losses import Batch, on_device
from userdp.models.checks import trainable_parameters
from userdp.names.optimizers import NOTHING_USES_PUBLIC
from userdp.optimizers.scaled_momentum import ScaledMomentum, refuse_unlearnt
from userdp.prices.earlier import Earlier
from userdp.runs.files import overlap
from userdp.step import PrivateStep
from userdp.tasks import Task

DECLARED = (
    "records that were declared public were trained on without noise: whoever has something in "
    "them is not protected"
)
UNCHECKED = (
    "that nobody protected is among the owners of the public records could not be checked: ids are "
    "hidden under another key, or compared by another rule"
)
LEARNT = (
    "the scales of gradients come from records that were declared public: whoever has something in "
    "them is not protected"
)


# How many batches of public records show how large gradients usually are.
BATCHES_FOR_SCALES = 100


@dataclass(frozen=True, kw_only=True)
class PublicData:
    """Which public records are mixed in: `batch_size` of them a step, with a share of `weight`.

    With a weight of 0 they give a `ScaledMomentum` its scales, and nothing else.
    """

    store: UserStore
    weight: float = 0.5
    batch_size: int = 32

    def __post_init__(self) -> None:
        if not 0 <= self.weight < 1:
            raise InputError(f"public_weight={self.weight:g}: a share from 0 to below 1.")
        if self.batch_size < 1:
            raise InputError(f"public_batch_size={self.batch_size}: give at least 1.")

    @property
    def digest(self) -> str:
        """What the run depends on."""
        return f"{self.store.fingerprint} {self.weight!r} {self.batch_size}"

    def cautions(
        self, private: UserStore, earlier: Sequence[Earlier], homes: Sequence[Path]
    ) -> list[str]:
        """What a reader must know. Raises if somebody protected has records in the public store.

        Protected are the users of the private store, and of the `earlier` runs behind the weights,
        whose lists of users lie in `homes`.
        """
        shared = private.shares_users_with(self.store)
        before = overlap(self.store, {item.run: 1 for item in earlier}, homes)
        for count, whose in ((shared, "the private store"), (before.shared, "an earlier run")):
            if count:
                raise InputError(
                    f"{count:,} users of {whose} are in the public store: what is public has no "
                    "protection. Leave these users out of one of them (`userdp import "
                    "--drop-user`), or leave out [data] public."
                )
        declared = DECLARED if self.weight else LEARNT
        return [declared] if shared == 0 and before.is_known else [declared, UNCHECKED]


def public_of(settings: DataSettings) -> PublicData | None:
    """The public records that a configuration names."""
    given = {"weight": settings.public_weight, "batch_size": settings.public_batch_size}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if settings.public is None:
        for name in chosen:
            raise InputError(f"[data] public_{name} has no meaning without public: remove it.")
        return None
    return PublicData(store=UserStore.open(settings.public), **chosen)


@contextmanager
def mixed_in(
    public: PublicData | None, step: PrivateStep, tokenizer: Any, task: Task, sequence_length: int
) -> Iterator[None]:
    """Inside, every step of the optimizer takes the noised and the public gradient together."""
    if public is None:
        yield
        return
    rows = tokenise(
        public.store,
        tokenizer,
        sequence_length=sequence_length,
        encoding=task.encoding,
        verify=True,
    )
    if not len(rows):
        raise InputError(f"{public.store.path} has no record that can be trained on.")

    def gradient(of_step: int, number: int = 0) -> list[Tensor | None]:
        rng = step.record.streams("public").rng(of_step, number)
        size = min(public.batch_size, len(rows))
        return _gradient(step, task, task.batch(rows, rng.choice(len(rows), size, False), rng))

    def mix(*_: Any) -> None:
        # The row of the step is written by now, and counted: steps begin with 1 here.
        _mix(public.weight, step, gradient(step.record.steps))

    optimizer = step.optimizer
    if isinstance(optimizer, ScaledMomentum) and optimizer.lacks_public:
        optimizer.learn(gradient(0, number) for number in range(BATCHES_FOR_SCALES))
    if not public.weight:
        yield
        return
    handle = optimizer.register_step_pre_hook(mix)
    try:
        yield
    finally:
        handle.remove()


def check_use(public: PublicData | None, optimizer: torch.optim.Optimizer) -> None:
    """Refuse public records that nothing uses, and scales from public records that are missing."""
    is_scaled = isinstance(optimizer, ScaledMomentum) and optimizer.source == "public"
    if public is None:
        refuse_unlearnt(optimizer)
    elif not public.weight and not is_scaled:
        raise InputError(NOTHING_USES_PUBLIC)


def _gradient(step: PrivateStep, task: Task, batch: Batch) -> list[Tensor | None]:
    """The mean gradient of a batch of public records at the present weights."""
    parameters = list(trainable_parameters(step.model).values())
    batch = on_device(batch, parameters[0].device)
    with torch.enable_grad():
        loss = task.record_loss(step.model, batch).mean()
        return list(torch.autograd.grad(loss, parameters, allow_unused=True))


def _mix(weight: float, step: PrivateStep, found: list[Tensor | None]) -> None:
    """p.grad <- (1 - weight) p.grad + weight g, where g is the public gradient, clipped alike.

    Where gradients are scaled before they are clipped, so is this one.
    """
    parameters = list(trainable_parameters(step.model).values())
    if isinstance(step.optimizer, ScaledMomentum):
        scales = step.optimizer.scales_for(parameters).scales
        found = [g if g is None else s.times(g) for s, g in zip(scales, found, strict=True)]
    gradients = [g for g in found if g is not None]
    norm = torch.stack([g.float().norm() for g in gradients]).norm()
    # The same rule as for a user's update: else the larger of the two would decide.
    rule = step.plan.clip.at(step.clip_norm)
    factor = rule.factor(norm.clamp(min=1e-12), rule.clip_norm, 1.0)
    for parameter, gradient in zip(parameters, found, strict=True):
        assert parameter.grad is not None
        parameter.grad.mul_(1 - weight)
        if gradient is not None:
            parameter.grad.add_((weight * factor * gradient).to(parameter.grad.dtype))
