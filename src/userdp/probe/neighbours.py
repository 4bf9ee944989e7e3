"""Compares the clipped sums of cohorts with and without one extra user.

The extra user is long or short, has no record, or has huge or non-finite values (`tried_users`). It
comes first, in the middle or last. Then the cohort without it is summed once more, as in the next
step. The sum must move by exactly the extra user's own clipped update, as the plain loop computes
it for that user alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from userdp.clipping.checks.distance import distance, distances, norm_of
from userdp.clipping.checks.made_up import MadeUp
from userdp.clipping.checks.tried_rule import rule_that_clips
from userdp.clipping.checks.wide_reference import wide_gradient
from userdp.clipping.fast import FastClipping
from userdp.clipping.kernels.running import uncompiled
from userdp.clipping.layer_groups import Layers
from userdp.clipping.plain import PlainClipping, each_clipped
from userdp.clipping.rules import ClipRule
from userdp.clipping.settings import StepSettings
from userdp.clipping.summation import Summation, summation
from userdp.errors import PLAIN
from userdp.losses import (
    Batch,
    RecordLoss,
    Update,
    coarsest_dtype,
    on_device,
    records_in,
    wide_dtype,
)
from userdp.models.checks import trainable_parameters
from userdp.probe.seen import MOST_COUPLING, Probe
from userdp.probe.tried_users import Group, TriedUsers
from userdp.updates.contract import UpdateRule

# Coupling grows with the cohort, and real cohorts are larger than a probe's. So nothing is allowed
# beyond what rounding needs. On the CPU the fast path needs less than on a GPU: small models up to
# 1e-4, the 30 layers of SmolLM2-135M with adapters 1.8e-4 (and nothing in float64). In float64 it
# needs more than float64 rounding, because some models compute their norms in float32.
_FAST_ON_CPU = {torch.float32: 5e-4, torch.float64: 1e-5}
# On the plain path each user's update is computed in the same way in every cohort. Only the
# addition of updates is rounded. A GPU adds in any order.
_ADDING_ON_CPU = {torch.float32: 1e-5, torch.float64: 1e-9}
_ADDING_ON_CUDA = 1e-4
# For the fast path, run again on the same cohort on the CPU. The plain path repeats every bit.
_AGAIN_ON_CPU = 1e-6
_AGAIN = "the same step again"
_UNCLIPPED = "each user alone, with nobody clipped"
# A clip norm this many times larger clips nobody in a probe.
_LOOSE = 1e3
# In half precision the allowed coupling is the plain loop's own rounding error times the first
# number, plus the second.
_TIMES_ROUNDING = 3.0
_LITTLE = 0.05
# In half precision nothing above this is allowed. It is also the limit if there is no float32
# reference: it does not fit in memory, or the update is not the mean gradient.
_COARSE = 0.5
# Updates that the device must have room for, twice over, or else they are kept on the host: the
# sums of two cohorts, the extra user's update, and one on its way.
_UPDATES_AT_ONCE = 4
# Updates of more bytes than this are not kept for later, and few users' gradients are stored at a
# time: the probe must not need more memory than a step does.
_LARGE = 2**30
_FEW_USERS = 2
# The batch entry that multiplies a row's loss, to make losses huge or not finite.
_SCALE = "userdp_probe_scale"


class Trial:
    """The cohorts that are tried, and their clipped sums."""

    def __init__(
        self,
        model: nn.Module,
        made_up: MadeUp,
        *,
        longest: int,
        group_size: int,
        record_loss: RecordLoss,
        update: UpdateRule,
        rule: ClipRule,
        settings: StepSettings,
    ) -> None:
        self._model = model
        self._reads_tokens = made_up.has_tokens
        self._users = users = TriedUsers(made_up, longest=longest, group_size=group_size)
        self._longest, self._rows = users.longest, users.rows
        self._record_loss = record_loss
        self._update_rule = update
        self._path = settings.path
        self._settings = settings
        self._parameters = list(trainable_parameters(model).values())
        self._layers = Layers(model, self._parameters)
        # Bytes of one update.
        self._size = sum(p.numel() * wide_dtype(p.dtype).itemsize for p in self._parameters)
        self._is_large = self._size > _LARGE
        self._keep_on = self._where_updates_fit()
        self._oracle = self._plain(record_loss)
        self._rule = rule
        self._others = self._users.cohort()
        # By the clip norm that they were computed with; large updates are not kept.
        self._known: dict[float, list[Update]] = {}
        self._rule = rule_that_clips(rule, list(map(norm_of, self._updates())))
        self._allowed = self._what_rounding_explains()

    def probes(self, thorough: bool) -> Iterator[Probe]:
        """Try every cohort with and without one extra user, for every way of packing batches."""
        packings = (True, False) if thorough and self._path == "fast" else (True,)
        for mix in packings:
            clipping = self._clipping(self._record_loss, mix)
            # Computed first, so that no sum is held beside one that is kept for longer.
            unclipped = list(self._unclipped(clipping))
            alone = self._kept(self._sum(clipping, self._others))
            yield self._probe("each user alone", alone, self._of_oracle())
            yield from unclipped
            for name, extra in self._users.extras(thorough):
                own_of = self._own_of(extra)
                for place, where in self._places(thorough):
                    cohort = [*self._others[:where], extra, *self._others[where:]]
                    found = self._sum(clipping, cohort)
                    yield self._probe(f"{name}, {place}", found, alone, own_of())
            later = self._sum(clipping, self._others)
            # After larger users the fast path may pack the cohort differently, which rounds
            # differently.
            allowed = self._allowed_again() if self._path == "plain" else None
            yield self._probe("the next step, after them", later, alone, allowed=allowed)
            if thorough:
                backwards = self._sum(clipping, self._others[::-1])
                yield self._probe("another order", backwards, alone)
        if thorough:
            yield from self._with_scaled_losses()

    def _unclipped(self, clipping: Summation) -> Iterator[Probe]:
        """Sum the cohort twice, with a clip norm at which nobody is clipped.

        Clipping would hide how large updates are: that of a loss which weighs every record by what
        else is in the batch, and the smallest effect of what a loss or a model keeps outside its
        modules.
        """
        usual, self._rule = self._rule, self._rule.at(_LOOSE * self._rule.clip_norm)
        first = self._kept(self._sum(clipping, self._others))
        size = norm_of(first) or 1.0
        yield self._probe(_UNCLIPPED, first, self._of_oracle(), size=size)
        again = self._sum(clipping, self._others)
        yield self._probe(_AGAIN, again, first, allowed=self._allowed_again(), size=size)
        self._rule = usual

    def _places(self, thorough: bool) -> list[tuple[str, int]]:
        last = len(self._others)
        found = [("first", 0), ("in the middle", last // 2), ("last", last)]
        return found if thorough else found[::2]

    def _of_oracle(self) -> Update:
        """The sum that the cohort must have: each user computed alone, padded to its own length."""
        total: Update = []
        groups = iter(self._others)
        # Not by zip: it would hold an update while the next one is computed.
        for update in self._updates():
            self._clip_in_place(update, next(groups))
            if not total:
                total = update
                continue
            for running, tensor in zip(total, update, strict=True):
                running += tensor
            # The next update is computed while this one would still be held.
            del update
        return total

    def _with_scaled_losses(self) -> Iterator[Probe]:
        """Make one user's loss huge or not finite: only that user's update may change."""

        def scaled_loss(model: nn.Module, batch: Batch) -> Tensor:
            own = {name: tensor for name, tensor in batch.items() if name != _SCALE}
            return self._record_loss(model, own) * batch[_SCALE]

        def scaled(group: Group, factor: float) -> Group:
            rows = records_in(group)
            return group | {_SCALE: torch.full((rows,), factor, dtype=torch.float64)}

        others = [scaled(group, 1.0) for group in self._others]
        clipping = self._clipping(scaled_loss, True)
        alone = self._kept(self._sum(clipping, others))
        kinds = {"a huge user": 1e6, "a user beyond float32": 1e30}
        kinds |= {"a user of infinite loss": math.inf, "a user whose loss is no number": math.nan}
        for name, factor in kinds.items():
            extra = scaled(self._users.group(1, self._longest, 106), factor)
            for place, where in self._places(True):
                own = self._update(self._plain(scaled_loss), extra)
                self._clip_in_place(own, extra)
                found = self._sum(clipping, [*others[:where], extra, *others[where:]])
                yield self._probe(f"{name}, {place}", found, alone, own)

    def _plain(self, record_loss: RecordLoss) -> PlainClipping:
        return PlainClipping(
            self._model, self._parameters, record_loss=record_loss, update=self._update_rule
        )

    def _clipping(self, record_loss: RecordLoss, mix: bool) -> Summation:
        if self._path == "plain" or not self._update_rule.is_mean_gradient:
            return summation(
                self._model,
                self._parameters,
                self._update_rule,
                self._rule,
                record_loss=record_loss,
                settings=replace(self._settings, path=self._path, compute_dtype=None),
                sequence_length=self._longest,
            )
        # Probe in the weights' own dtype and without compilation. Compiled code is compared
        # separately, shape by shape.
        settings = replace(
            self._settings,
            compute_dtype=None,
            compile_blocks=False,
            mix_sizes=mix,
            check=False,
            # Only the run's own loss can be computed over joined records, not a scaled one.
            join_records=self._settings.join_records if record_loss is self._record_loss else False,
            microbatch_tokens=max(64, 4 * self._longest * self._rows),
        )
        return FastClipping(
            self._model,
            self._parameters,
            self._rule,
            record_loss=record_loss,
            settings=settings,
            sequence_length=self._longest,
            most_stored_users=_FEW_USERS if self._is_large else None,
            update=self._update_rule,
        )

    def _sum(self, clipping: Summation, groups: Sequence[Group]) -> Update:
        """The clipped sum of these groups; the next one may overwrite it."""
        with uncompiled():
            return clipping.clipped_sum(groups, self._rule).total.views

    def _where_updates_fit(self) -> torch.device:
        """The device, or the host if the device may have room for one update only."""
        device = self._parameters[0].device
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            if 2 * _UPDATES_AT_ONCE * self._size <= free:
                return device
        return torch.device("cpu")

    def _update(self, oracle: PlainClipping, group: Group) -> Update:
        return [tensor.to(self._keep_on) for tensor in oracle.update(group, self._rule)]

    def _updates(self) -> Iterator[Update]:
        """Each user's update, alone, in a list that may be changed.

        Large ones are computed anew: one is held at a time.
        """
        # Local training clips on the way, so its updates depend on the rule.
        is_local = self._update_rule.local_training is not None
        clip_norm = self._rule.clip_norm if is_local else 0.0
        updates = (self._update(self._oracle, group) for group in self._others)
        if self._is_large:
            return updates
        if clip_norm not in self._known:
            self._known[clip_norm] = list(updates)
        return map(list, self._known[clip_norm])

    def _kept(self, tensors: Update) -> Update:
        return [tensor.detach().to(self._keep_on, copy=True) for tensor in tensors]

    def _clip_in_place(self, update: Update, group: Group) -> None:
        """Replace the tensors by the group's contribution, one by one: no second list is held."""
        weight = self._update_rule.weight(records_in(group))
        layers = self._layers.by(self._rule)
        for place, tensor in enumerate(each_clipped(update, self._rule, layers=layers)):
            update[place] = tensor if weight == 1 else tensor * weight

    def _own_of(self, extra: Group) -> Callable[[], Update | None]:
        """Gives the extra user's own contribution.

        A large one is computed each time, so that none is held while a cohort is summed.
        """
        if self._is_large:
            return partial(self._own, extra)
        own = self._own(extra)
        return lambda: own

    def _own(self, extra: Group) -> Update | None:
        if not records_in(extra):
            return None
        own = self._update(self._oracle, extra)
        self._clip_in_place(own, extra)
        return own

    def _probe(
        self,
        name: str,
        found: Update,
        before: Update,
        own: Update | None = None,
        *,
        allowed: float | None = None,
        size: float | None = None,
    ) -> Probe:
        """How far the sum moved, and how far beyond `own`, relative to `size` (the bound)."""
        moved, rest = distances(found, before, own)
        size = size or self._rule.bound
        return Probe(
            name=f"{self._path}: {name}",
            movement=moved / size,
            coupling=rest / size,
            allowed_coupling=self._allowed if allowed is None else allowed,
        )

    def _allowed_again(self) -> float:
        """How far two sums of the very same cohort may differ."""
        is_wide = coarsest_dtype(self._model.parameters()).itemsize >= 4
        if self._parameters[0].device.type != "cpu" or not is_wide:
            return self._allowed
        return 0.0 if self._path == "plain" else _AGAIN_ON_CPU

    def _what_rounding_explains(self) -> float:
        """How much coupling rounding explains, in clip norms.

        In half precision this is measured, as the distance of the plain loop from float32.
        """
        is_wide = coarsest_dtype(self._model.parameters()).itemsize >= 4
        on_cpu = self._parameters[0].device.type == "cpu"
        narrowest = coarsest_dtype(self._parameters)
        if self._path == "plain" and (on_cpu or is_wide):
            by_dtype = _ADDING_ON_CPU if on_cpu else {}
            return by_dtype.get(wide_dtype(narrowest), _ADDING_ON_CUDA)
        if is_wide:
            return _FAST_ON_CPU.get(narrowest, MOST_COUPLING) if on_cpu else MOST_COUPLING
        if not self._update_rule.is_mean_gradient:
            return _COARSE
        try:
            moved = sum(map(self._distance_from_wide, self._others, self._updates()))
        except torch.OutOfMemoryError:
            return _COARSE
        return min(_COARSE, _TIMES_ROUNDING * moved / self._rule.bound + _LITTLE)

    def _distance_from_wide(self, group: Group, update: Update) -> float:
        """How far the plain loop's update of a group is from that in float32, both clipped."""
        self._clip_in_place(update, group)
        device = self._parameters[0].device
        wide = wide_gradient(
            self._model,
            self._parameters,
            on_device(group, device),
            record_loss=self._record_loss,
            scales=self._update_rule.scales,
        )
        self._clip_in_place(wide, group)
        return distance(wide, update)

    def cause_of(self, probe: Probe) -> str:
        """What is wrong, by how much, and what to do."""
        how_far = max(probe.movement, probe.coupling)
        if probe.name.endswith(_UNCLIPPED):
            return (
                f"the sum of a batch is off by {how_far:.3g} of its size ({probe.name}): the loss "
                "or the model weighs a record by what else is in the batch. Return a loss for each "
                'record that depends on that record alone, or use path="plain".'
            )
        head = f"the clipped sum is off by {how_far:.3g} clip norms ({probe.name}): "
        if self._path == "plain" or probe.name.endswith(_AGAIN):
            return head + (
                "the model or the loss keeps something of one user for the next outside its "
                "modules. It cannot be trained with a guarantee."
            )
        name, error = self._worst_on_equal_lengths()
        if self._reads_tokens and error <= self._allowed:
            return head + (
                "a record's gradient depends on how far it is padded, which other users' lengths "
                "decide, as in models that also look at what follows. Use "
                f"{PLAIN}, where each user has its own padding only."
            )
        return head + (
            "the fast path does not tell the users of a batch apart in this model, or does not see "
            f"all uses of {name!r}. Use {PLAIN}."
        )

    def _worst_on_equal_lengths(self) -> tuple[str, float]:
        """The parameter with the largest error if nobody is padded, and the error in clip norms."""
        groups = [self._users.group(1, self._longest / 2, 200 + i) for i in range(3)]
        each = [self._own(group) or [] for group in groups]
        total = self._clipping(self._record_loss, False).clipped_sum(groups, self._rule).total
        found = [view.to(self._keep_on) for view in total.views]
        names = {id(p): name for name, p in self._model.named_parameters()}
        errors = {
            names[id(parameter)]: float((sums - sum(expected)).norm()) / self._rule.bound
            for parameter, sums, *expected in zip(self._parameters, found, *each, strict=True)
        }
        return max(errors.items(), key=lambda item: item[1])
