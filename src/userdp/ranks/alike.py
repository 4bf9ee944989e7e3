"""Are the ranks of one run alike? They begin with the same things and stay with the same weights.

Ranks that differ would add different noise, or updates of different models. So what a run depends
on is compared before its first step, and the weights from time to time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from userdp.clipping.settings import StepSettings
from userdp.digests.of_runs import (
    code_version,
    index_digest,
    optimizer_digest,
    trained_digest,
    weights_digest,
)
from userdp.errors import InputError, StoppedRunError
from userdp.files.chain import canonical
from userdp.index import UserIndex
from userdp.losses import Batch
from userdp.plan import Plan
from userdp.ranks.group import Ranks
from userdp.sharded_tensors import is_shard

# From what needs the model to what runs it, on all ranks together.
Running = Callable[[Callable[[], None]], Callable[[], None]]

# Weights are compared after the first step, and whenever the number of steps is a multiple of this.
STEPS_BETWEEN = 100


def check_alike(
    ranks: Ranks,
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    index: UserIndex,
    settings: StepSettings,
) -> None:
    """Refuse, on every rank, what is not the same on all of them."""
    if ranks.count == 1:
        return
    ranks.check_same(
        {
            "version of this package, torch, transformers or peft": code_version(),
            "plan": canonical(plan.to_json()),
            # The rows of a sharded model are different ones on each rank.
            "set of initial weights": "" if _is_sharded(model) else weights_digest(model),
            "optimizer or learning rate": optimizer_digest(optimizer),
            "set of users and rows": index_digest(index),
            "choice of settings": str(settings),
        }
    )


class Checked(Protocol):
    """A model that is probed before it is trained (`checked_model`)."""

    is_checked: bool

    def check_model(self, example: Batch | None) -> None:
        """Probe the model, once."""
        ...


def check_tried(ranks: Ranks, checked: Checked, running: Running) -> None:
    """With several ranks, probe the model now: later, each rank would see other groups.

    `running` is how code runs that needs the model. With shards it may gather the whole model, so
    it is left out where nothing has to be probed.
    """
    if ranks.count == 1 or checked.is_checked:
        return

    def probe() -> None:
        with ranks.together():
            checked.check_model(None)
            if not checked.is_checked:
                raise InputError(
                    f"{ranks.count} ranks train this model, and nothing is known about its rows: "
                    "call check_model(example) with a made-up example before the first step."
                )

    running(probe)()


def is_check_due(step: int) -> bool:
    """Whether the weights are compared after so many steps."""
    return step == 1 or step % STEPS_BETWEEN == 0


def check_weights(ranks: Ranks, model: nn.Module) -> None:
    """Raise, on every rank, if the trained weights are not the same on all of them."""
    if ranks.count == 1 or any(is_shard(p) for p in model.parameters() if p.requires_grad):
        return
    found = ranks.gathered(trained_digest(model))
    others = [rank for rank, digest in enumerate(found) if digest != found[0]]
    if others:
        raise StoppedRunError(
            f"rank {others[0]} has other weights than rank 0 after the same steps: something "
            "changed them outside the private step, or its hardware computes otherwise. What is "
            "saved is sound. Mend that, then go on with the same command and --resume."
        )


def _is_sharded(model: nn.Module) -> bool:
    return any(is_shard(parameter) for parameter in model.parameters())
