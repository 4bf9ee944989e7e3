"""Clips one update at a time and adds it up: the plain loop, the oracle of every faster path.

Each user goes through the model alone and is padded only to its own length. What the model kept of
a user is reset before the next one. So a user's update depends on that user alone, whatever a model
does with padding, other users' rows or its memory. The plain loop shares only the equations
(`rules`, `factors`) and the buffer with the fast path.

Norms are taken in float64, and values are kept in float32 at least: a bf16 norm can exceed its
bound by one part in 128. The sensitivity is that of the sum, not of the mean, so dividing comes
after the noise.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from userdp.clipping.factors import ROUNDING_MARGIN, clip_factors
from userdp.clipping.flat import ClippedSum, FlatBuffer
from userdp.clipping.layer_groups import Layers
from userdp.clipping.rules import ClipRule
from userdp.losses import (
    Batch,
    RecordLoss,
    Update,
    at_least_float32,
    on_device,
    records_in,
    wide_dtype,
)
from userdp.module_state import ModuleState
from userdp.sharded_tensors import leaf_of
from userdp.updates.contract import UpdateRule
from userdp.updates.mean_gradient import MEAN_GRADIENT

_LOG = logging.getLogger(__name__)


def clip_update(
    update: Sequence[Tensor], rule: ClipRule, *, layers: Sequence[int] | None = None
) -> Update:
    """The update scaled so that its L2 norm over all tensors together is at most the rule's bound.

    `layers` gives the number of each tensor's layer, for a rule that clips each layer on its own.
    By default every tensor is a layer.

    Guarantee: the exact norm of the result is at most `rule.bound`. An update with a value that is
    not finite gives zero, so that nobody can poison the sum.
    Reference: McMahan et al. 2018, Eq. 1.

    >>> from userdp import FlatClip
    >>> clip_update([torch.tensor([3.0, 4.0])], FlatClip(clip_norm=1.0))
    [tensor([0.6000, 0.8000])]
    >>> clip_update([torch.tensor([float("nan"), 4.0])], FlatClip(clip_norm=1.0))
    [tensor([0., 0.])]
    """
    return list(each_clipped(update, rule, layers=layers))


def each_clipped(
    update: Sequence[Tensor], rule: ClipRule, *, layers: Sequence[int] | None = None
) -> Iterator[Tensor]:
    """The tensors of `clip_update`, one at a time: all of them may not fit beside the update."""
    squares = torch.stack(
        [
            torch.linalg.vector_norm(at_least_float32(tensor), dtype=torch.float64).square()
            for tensor in update
        ]
    )
    numbers = list(range(len(update))) if layers is None else list(layers)
    if rule.by_layer:
        zeros = squares.new_zeros(max(numbers) + 1)
        squared = zeros.index_add_(0, torch.tensor(numbers, device=squares.device), squares)
    else:
        numbers = [0] * len(update)
        squared = squares.sum()[None]
    margin = ROUNDING_MARGIN * max(torch.finfo(wide_dtype(tensor.dtype)).eps for tensor in update)
    factors = clip_factors(squared[:, None], rule, margin=margin)[:, 0]
    for number, tensor in zip(numbers, update, strict=True):
        wide = at_least_float32(tensor)
        yield torch.where(factors[number] > 0, wide * factors[number].to(wide.dtype), 0.0)


def clipped_sum(
    updates: Iterable[Update],
    rule: ClipRule,
    *,
    like: Sequence[Tensor],
    layers: Sequence[int] | None = None,
) -> Update:
    """The sum of the clipped updates. Without any update, zeros shaped `like` the parameters.

    Guarantee: adding or removing one update moves the sum by at most `rule.bound`.
    """
    total = [torch.zeros_like(leaf_of(t), dtype=wide_dtype(t.dtype)) for t in like]
    for update in updates:
        for running, tensor in zip(total, each_clipped(update, rule, layers=layers), strict=True):
            running += tensor
        # The next update is computed while this one would still be held.
        del update
    return total


class PlainClipping:
    """Computes clipped sums of cohorts, one group at a time; `update` is the rule for each group.

    With `skip_failing`, a group whose update cannot be computed counts as zero. This is for steps
    after the model was probed. A failure then comes from this group's data, and one user's data
    must not decide whether a run goes on.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        *,
        record_loss: RecordLoss,
        update: UpdateRule | None = None,
        microbatch_records: int | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self._model = model
        self._rule = update or MEAN_GRADIENT
        self._parameters = list(parameters)
        self._record_loss = record_loss
        self._microbatch_records = microbatch_records
        self._compute_dtype = compute_dtype
        self._state = ModuleState(model)
        self.skip_failing = False
        self.differs = False
        self._layers = Layers(model, parameters)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the next sum depends on its groups and the weights alone."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is nothing to go on from."""

    def clipped_sum(
        self, groups: Iterable[Batch], rule: ClipRule, *, failures: Failures | None = None
    ) -> ClippedSum:
        """The clipped sum over the groups, and how many were within the clip norm. Secret.

        If the groups are only a part of a cohort, `failures` counts those of the whole cohort.
        """
        total = FlatBuffer(self._parameters)
        count, within, total_weight = 0, 0, 0.0
        own = failures or Failures(self.skip_failing)
        layers = self._layers.by(rule)
        for group in groups:
            # A group without a record adds nothing, neither to the sum nor to the counts.
            num_records = records_in(group)
            if not num_records:
                continue
            count += 1
            with own.of_one_group():
                update = self.update(group, rule)
                norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in update]
                within += int(torch.stack(norms).norm() <= rule.clip_norm)
                clipped = each_clipped(update, rule, layers=layers)
                # At most 1, so the weighted update is within the bound as well.
                weight = self._rule.weight(num_records)
                for running, tensor in zip(total.views, clipped, strict=True):
                    running += tensor if weight == 1 else tensor * weight
                total_weight += weight
                del update, clipped
        if failures is None:
            own.warn_if_all_failed(count)
        return ClippedSum(
            total=total,
            num_within=torch.tensor(within),
            num_updates=count,
            weight=total_weight,
        )

    def update(self, group: Batch, rule: ClipRule | None = None) -> Update:
        """The group's update before its last clipping. Secret.

        Local training also clips on the way, by the rule if one is given.
        """
        device, dtype = self._parameters[0].device, self._compute_dtype
        try:
            # torch keeps rounded copies of weights while autocast is on, also if the weights move,
            # as in local training.
            keeps_copies = self._rule.is_mean_gradient
            with torch.autocast(
                device.type, dtype, enabled=dtype is not None, cache_enabled=keeps_copies
            ):
                return self._rule.of_group(
                    self._model,
                    [leaf_of(parameter) for parameter in self._parameters],
                    on_device(group, device),
                    record_loss=self._record_loss,
                    clip=list
                    if rule is None
                    else partial(clip_update, rule=rule, layers=self._layers.by(rule)),
                    microbatch_records=self._microbatch_records,
                )
        finally:
            self._state.restore()


class Failures:
    """Handles groups whose update cannot be computed: they count as zero, or the error is raised.

    If every group of a step fails, something is probably wrong with the loss or the batches. That
    is logged and not raised: with one user more or less, one group might not have failed.
    """

    def __init__(self, skip: bool) -> None:
        self._skip = skip
        self._count = 0
        self._last: Exception | None = None

    @contextlib.contextmanager
    def of_one_group(self) -> Iterator[None]:
        """Run one group, and pass over its failure if asked to."""
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError):
            # Running out of memory is a matter of the machine, not of the data.
            raise
        except Exception as error:
            if not self._skip:
                raise
            self._count += 1
            self._last = error

    def warn_if_all_failed(self, num_groups: int) -> None:
        """Log a warning if there were groups and all failed. The message holds nobody's data."""
        if self._last is not None and self._count == num_groups:
            _LOG.warning(
                "all %d groups of a step failed (the last: %s) and count as zero: look at the loss "
                "and the batches.",
                num_groups,
                type(self._last).__name__,
            )
