"""A sampler, a noise, an update and a clip rule of one's own: the examples of docs/extending.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from userdp.accounting import events
from userdp.clipping.rules import CLIP_RULES, ClipRule
from userdp.index import UserIndex
from userdp.noise import NOISES, Gaussian, Noise
from userdp.prices.table import ONE_OWNER, each_step, set_price
from userdp.sampling import SAMPLERS, Cohort, PoissonUsers, PublicNumbers, Sampler
from userdp.streams import Streams
from userdp.units import Adjacency, SamplingUnit
from userdp.updates.contract import UPDATE_RULES, UpdateRule

if TYPE_CHECKING:
    from torch import Tensor, nn

    from userdp.losses import Batch, RecordLoss
    from userdp.updates.contract import ClipFunction


# ---- a sampler


@SAMPLERS.register
@dataclass(frozen=True, kw_only=True)
class CyclicUsers(Sampler):
    """Users are dealt into `parts` once; step t takes every user of part t mod `parts`."""

    name: ClassVar[str] = "toy-cyclic"
    unit: ClassVar[SamplingUnit] = SamplingUnit.USER
    keys: ClassVar[Mapping[str, str]] = {"toy_parts": "parts"}
    parts: int

    @classmethod
    def configured(cls, public: PublicNumbers, **own: Any) -> Self:
        return cls(group_size=public.group_size, parts=own["parts"])

    def draw(self, index: UserIndex, step: int, streams: Streams) -> Cohort:
        # Piece 1 of step 0 deals the users out: the same at every step, without any state. Each
        # user's part is drawn alone, so nobody's absence moves anybody else.
        part_of_user = streams.rng(0, 1).integers(self.parts, size=index.num_users)
        rng = streams.rng(step)
        chosen = np.flatnonzero(part_of_user == step % self.parts)
        return Cohort.of(
            [rng.permutation(index.rows_of(int(user)))[: self.group_size] for user in chosen]
        )

    @property
    def words(self) -> str:
        return f"users in {self.parts} parts, one part a step, at most {self.group_size} records"


def cyclic_price(sampler: CyclicUsers, noise: Gaussian, steps: int) -> events.DpEvent:
    """Nothing is hidden by the draw: a user takes part in every `parts`-th step for certain."""
    step = events.poisson_users_gaussian(
        user_sampling_prob=1.0, noise_multiplier=noise.noise_multiplier
    )
    return events.repeated(step, -(-steps // sampler.parts))


set_price(CyclicUsers, Gaussian, (Adjacency.ZERO_OUT,), cyclic_price)


# ---- a noise


@NOISES.register
@dataclass(frozen=True, kw_only=True)
class TwiceDrawn(Noise):
    """Gaussian noise as the sum of two independent halves: the same distribution."""

    name: ClassVar[str] = "toy-twice"
    title: ClassVar[str] = "Gaussian in two halves"

    def add_(
        self,
        values: Tensor,
        *,
        offset: int,
        size: int,
        noise_stddev: float,
        step: int,
        streams: Streams,
    ) -> None:
        import torch

        for half in (0, 1):
            # Drawn whole and cut: by position, whoever asks.
            drawn = streams.rng(step, half).standard_normal(size)[offset : offset + len(values)]
            values += torch.from_numpy(drawn).to(values) * (noise_stddev / 2**0.5)

    @property
    def words(self) -> str:
        return f"noise_multiplier={self.noise_multiplier:.4g}"


def twice_price(sampler: PoissonUsers, noise: TwiceDrawn) -> events.DpEvent:
    """The price of Gaussian noise, which it is."""
    return events.poisson_users_gaussian(
        user_sampling_prob=sampler.user_sampling_prob, noise_multiplier=noise.noise_multiplier
    )


set_price(PoissonUsers, TwiceDrawn, ONE_OWNER, each_step(twice_price))


# ---- a clip rule


@CLIP_RULES.register
@dataclass(frozen=True, kw_only=True)
class SmoothClip(ClipRule):
    """D * S / sqrt(S^2 + ||D||^2): below S, and smooth."""

    name: ClassVar[str] = "toy-smooth"
    keys: ClassVar[Mapping[str, str]] = {"clip_norm": "clip_norm"}
    clip_norm: float

    def factor(self, norms: Any, clip_norm: Any, share: float) -> Any:
        return share * clip_norm / (clip_norm**2 + norms**2) ** 0.5

    def bound_at(self, clip_norm: Any) -> Any:
        return clip_norm

    @property
    def words(self) -> str:
        return f"smooth clipping to {self.clip_norm:g}"


# ---- an update


@UPDATE_RULES.register
@dataclass(frozen=True, kw_only=True)
class LocalSteps(UpdateRule):
    """A few steps of gradient descent on the group's own records; the update is how far it went."""

    name: ClassVar[str] = "toy-local"
    keys: ClassVar[Mapping[str, str]] = {"toy_steps": "steps", "toy_rate": "rate"}
    steps: int = 2
    rate: float = 0.1

    def of_group(
        self,
        model: nn.Module,
        parameters: Sequence[Tensor],
        batch: Batch,
        *,
        record_loss: RecordLoss,
        clip: ClipFunction,
        microbatch_records: int | None = None,
    ) -> list[Tensor]:
        import torch

        start = [parameter.detach().clone() for parameter in parameters]
        try:
            for _ in range(self.steps):
                loss = record_loss(model, batch).mean()
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
                with torch.no_grad():
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        if gradient is not None:
                            parameter -= self.rate * gradient
            # The server's optimizer goes against its gradient, so the update is start minus end.
            return [(s - p.detach()).float() for s, p in zip(start, parameters, strict=True)]
        finally:
            with torch.no_grad():
                for parameter, value in zip(parameters, start, strict=True):
                    parameter.copy_(value)

    @property
    def words(self) -> str:
        return f"{self.steps} local steps at rate {self.rate:g}"
