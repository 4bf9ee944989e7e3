"""Chooses the code that computes the clipped sum of a cohort."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import nn

from userdp.clipping.fast import FastClipping
from userdp.clipping.filtered import FilteredClipping
from userdp.clipping.flat import ClippedSum
from userdp.clipping.layer_groups import Layers
from userdp.clipping.local import LocalClipping
from userdp.clipping.plain import PlainClipping
from userdp.clipping.rules import ClipRule
from userdp.clipping.settings import StepSettings
from userdp.losses import Batch, RecordLoss
from userdp.updates.contract import UpdateRule
from userdp.updates.halting import HaltingTest


class Summation(Protocol):
    """Computes the clipped sum of a cohort.

    With `skip_failing`, a group whose update cannot be computed counts as zero. `differs` says that
    the fast path was seen to differ from the plain loop.
    """

    skip_failing: bool
    differs: bool

    def clipped_sum(self, groups: Iterable[Batch], rule: ClipRule) -> ClippedSum:
        """The sum of one update per group, each clipped once. Secret."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What the next sum depends on beside its groups and the weights. Secret."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        ...


def summation(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    update: UpdateRule,
    rule: ClipRule,
    *,
    record_loss: RecordLoss,
    settings: StepSettings,
    sequence_length: int | None,
    group_size: int | None = None,
    every_shape: bool = True,
    test: HaltingTest | None = None,
    is_shared: bool = False,
) -> Summation:
    """The fast path of these updates if it is asked for and there is one, else the plain loop.

    `is_shared` says that other ranks compute other parts of the same cohort.
    """
    # Raises now, not at the first step, where the rule names other parameters than the model has.
    Layers(model, parameters).by(rule)
    if settings.path == "fast" and update.is_mean_gradient:
        return FastClipping(
            model,
            parameters,
            rule,
            record_loss=record_loss,
            settings=settings,
            sequence_length=sequence_length,
            group_size=group_size,
            every_shape=every_shape,
            update=update,
        )
    plain = PlainClipping(
        model,
        parameters,
        record_loss=record_loss,
        update=update,
        microbatch_records=settings.microbatch_records,
        compute_dtype=settings.compute_dtype,
    )
    local = update.local_training
    if settings.path == "fast" and local is not None:
        return LocalClipping(
            plain,
            model,
            parameters,
            local,
            record_loss=record_loss,
            settings=settings,
            sequence_length=sequence_length,
        )
    if test is None:
        return plain
    return FilteredClipping(plain, model, parameters, test, is_shared=is_shared)
