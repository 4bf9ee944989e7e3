"""A model that is probed before it is trained, and the groups of rows that it can read.

One user's data must not decide whether a run goes on. So the model is tested before the first step,
with made-up rows. After that, a group that cannot be read counts as zero.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from userdp.clipping.batches.users import PADDING, kind_of
from userdp.clipping.execute.models import num_classes_of
from userdp.clipping.flat import ClippedSum
from userdp.clipping.plain import PlainClipping
from userdp.clipping.rules import ClipRule
from userdp.clipping.settings import PathName, StepSettings
from userdp.clipping.summation import Summation, summation
from userdp.errors import NothingSeenError, UntriedModelError
from userdp.index import IGNORED_LABEL, UserIndex
from userdp.losses import (
    Batch,
    RecordLoss,
    Update,
    causal_lm_loss,
    classification_loss,
    masked_lm_loss,
    records_in,
)
from userdp.models.proven import is_proven, ways_of
from userdp.plan import Plan
from userdp.probe.verify import check_model, is_language_modelling, usual_length, vocabulary_of
from userdp.sampling import Cohort
from userdp.updates.contract import UpdateRule

# Raise an error once the model has failed on rows like those of this many users.
_MOST_UNTRIED = 8
# The tensors of a batch if no example is given.
TOKENS = ("input_ids", "labels")
# How far two computations of one group's update may be apart, relative to its size.
_SAME = 1e-5
_SAME_ON_CUDA = 1e-2
_LOG = logging.getLogger(__name__)


class CheckedModel:
    """The model, its clipped sums, and what kind of rows it was tried with.

    `summation` computes the clipped sums. It is replaced by a new one when the model has changed.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        plan: Plan,
        *,
        update: UpdateRule,
        record_loss: RecordLoss,
        settings: StepSettings,
        sequence_length: int | None,
        is_shared: bool = False,
    ) -> None:
        self._model = model
        self._num_users = plan.num_users
        self._scales = update.scales
        self._settings = settings
        self._summation = partial(
            summation,
            model,
            parameters,
            update,
            plan.clip,
            record_loss=record_loss,
            sequence_length=sequence_length,
            group_size=plan.sampler.rows_in_a_group,
            test=plan.halting_test,
            is_shared=is_shared,
        )
        self._is_own_loss = record_loss not in (
            causal_lm_loss,
            masked_lm_loss,
            classification_loss,
        )
        self.summation: Summation = self._new_summation()
        self._check = partial(
            check_model,
            model,
            group_size=plan.sampler.rows_in_a_group,
            record_loss=record_loss,
            update=update,
            rule=plan.clip,
            settings=settings,
        )
        # The losses of this package keep nothing. A loss of one's own may keep records for later
        # steps, and begin to use them when the probe is long over.
        self._witness = (
            PlainClipping(model, parameters, record_loss=record_loss, update=update)
            if self._is_own_loss
            else None
        )
        self.is_checked = False
        # Whether users run one at a time because made-up rows have no gradient.
        self._is_alone = False
        # The example that the model was checked with (secret), and how the model computed then.
        self._example: Batch | None = None
        self._ways: list[Any] = []
        # The users on whose kind of rows the model failed. Secret.
        self._untried: set[int] = set()
        # One public length, fixed before the first step. Longer rows were not tried, so they are
        # not admitted.
        self._is_length_given = sequence_length is not None
        self._longest = sequence_length or usual_length(model)
        self._vocabulary = vocabulary_of(model)
        self._num_classes = num_classes_of(model)

    def _new_summation(self, *, path: PathName | None = None) -> Summation:
        settings = replace(self._settings, path=path or self._settings.path)
        # In a model that is not proven, and by a loss of one's own, rows may affect each other in
        # some batch shapes only.
        every_shape = self._is_own_loss or not is_proven(self._model)
        return self._summation(settings=settings, every_shape=every_shape)

    def check_model(self, example: Batch | None) -> None:
        """Probe the model, once, with rows like those of the example, which is public."""
        if self.is_checked:
            return
        if not self._is_length_given:
            self._longest = usual_length(self._model, example)
        self._probe(example)

    def state_dict(self) -> dict[str, Any]:
        """How the sums are computed from here on, where that changed since the beginning."""
        return {
            "is_checked": self.is_checked,
            "alone": self._is_alone,
            "sums": self.summation.state_dict(),
            "longest": self._longest,
        }

    def load_state_dict(self, state: dict[str, Any], example: Batch | None) -> None:
        """Go on as after the probe and the steps that led to this state."""
        if not state["is_checked"]:
            return
        self._longest, self._is_length_given = state["longest"], True
        if state["alone"]:
            self._run_alone()
        self._example, self._ways = example, ways_of(self._model)
        self.is_checked = self.summation.skip_failing = True
        self.summation.load_state_dict(state["sums"])

    def update_of_one(self, groups: Sequence[Batch], rule: ClipRule) -> Update | None:
        """The update of the first group that has one alone; only for a caller's own loss. Secret.

        It must be the same before and after the step's sum is computed.
        """
        if self._witness is None:
            return None
        for group in groups:
            if not records_in(group):
                continue
            try:
                return self._witness.update(group, rule)
            except (torch.OutOfMemoryError, MemoryError):
                raise
            except Exception:
                # This group's own data fails, so the sum counts it as zero. The next is as good.
                continue
        return None

    def is_explained(self, total: ClippedSum, update: Update | None) -> bool:
        """Whether the sum is possible, if `update_of_one` gave this `update` before it.

        If no group has an update alone, the sum must be zero. Otherwise the caller's loss fails or
        works because of what it keeps of other groups.
        """
        if self._witness is None or update is not None:
            return True
        return total.is_zero

    def _run_alone(self) -> None:
        self._is_alone = True
        self.summation = self._new_summation(path="plain")

    def _check_changed(self) -> None:
        """Check the model again if its mode, a hook or a method changed since the last check."""
        if not self.is_checked or ways_of(self._model) == self._ways:
            return
        # Old comparisons and captured graphs belong to the model as it was before.
        differed = self.summation.differs
        self.summation = self._new_summation()
        self.summation.differs = differed
        self._probe(self._example)

    def _probe(self, example: Batch | None) -> None:
        self._example, self._ways = example, ways_of(self._model)
        try:
            with nullcontext() if self._scales is None else self._scales.tried():
                self.is_checked = self._check(example, sequence_length=self._longest)
        except NothingSeenError as error:
            # Alone, users cannot affect each other in a batch. What a model keeps in its modules is
            # put back after every user, and a loss of one's own is watched at every step.
            _LOG.warning("users run one at a time: %s", error)
            self._run_alone()
            self.is_checked = True
        if self.is_checked and not self._is_length_given and "input_ids" in (example or TOKENS):
            self._is_length_given = True
            _LOG.warning(
                "sequence_length is not given: records of more than %d tokens count as zero.",
                self._longest,
            )
        # The model works on made-up rows. From here on a group that fails does so because of its
        # own data.
        self.summation.skip_failing = self.is_checked

    def is_tried(self, cohort: Cohort, groups: Sequence[Batch], index: UserIndex) -> bool:
        """Whether the model is checked, as it is now. If not, rows like a group's are tried first.

        One user's data must not decide whether a run goes on. So every user has one vote on what
        rows look like, and the kind of rows that most users have is tried first. If the model fails
        on rows like one group's, the next group's are tried. If it fails on those of every group,
        all groups count as zero, as they would by themselves, and the next step tries again. An
        error is raised once the rows of many users have failed. If the probe finds the model
        unsafe, that error is always raised.
        """
        self._check_changed()
        if self.is_checked:
            return True
        owners = index.owner_of_rows()
        examples = [
            (_kind(group), int(owners[rows[0]]), group)
            for rows, group in zip(cohort, groups, strict=True)
            if len(rows) and records_in(group)
        ]
        votes = Counter(kind for kind, _ in {(kind, user) for kind, user, _ in examples})
        for _, user, example in sorted(examples, key=lambda item: (-votes[item[0]], item[0])):
            try:
                self._probe(example)
                return True
            except UntriedModelError:
                self._untried.add(user)
                if len(self._untried) >= min(_MOST_UNTRIED, max(2, self._num_users // 2)):
                    raise
        if examples:
            _LOG.warning("the model fails on rows like those of a step: all count as zero.")
        return not examples

    def readable(self, groups: list[Batch]) -> list[Batch]:
        """The groups. One that cannot be read loses its rows, so that it counts as zero."""
        read = [self.reads(group) for group in groups]
        if groups and not any(read):
            _LOG.warning(
                "no group of a step can be read: tokens beyond the vocabulary, rows longer than "
                "sequence_length=%d, or tensors that do not fit together.",
                self._longest,
            )
        return [
            group if can_read else without_rows(group)
            for group, can_read in zip(groups, read, strict=True)
        ]

    def _are_labels(self, labels: Tensor) -> bool:
        """Whether each is a token or says that there is none."""
        if labels.is_floating_point():
            return bool(torch.isfinite(labels).all())
        known = (labels >= 0) & (labels < (self._vocabulary or 0))
        return bool((known | (labels == IGNORED_LABEL)).all())

    def _are_classes(self, labels: Tensor) -> bool:
        """Whether each is a class of the model or says that there is none."""
        if self._num_classes is None or labels.is_floating_point():
            return True
        known = (labels >= 0) & (labels < self._num_classes)
        return bool((known | (labels == IGNORED_LABEL)).all())

    def reads(self, group: Batch) -> bool:
        """Whether the group's tensors fit together and its tokens and classes are known.

        On a GPU a token beyond the vocabulary, or a class beyond the last, would end the process.
        """
        if any(t.dim() < 1 for t in group.values()) or len({len(t) for t in group.values()}) > 1:
            return False
        ids, labels = group.get("input_ids"), group.get("labels")
        if ids is None or not len(ids):
            return True
        if ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
            return False
        if ids.shape[1] > self._longest:
            return False
        padded = [tensor for name, tensor in group.items() if name in PADDING and tensor.dim() > 1]
        if any(tensor.shape != ids.shape for tensor in padded):
            return False
        if self._vocabulary is None:
            return True
        if labels is not None and labels.dim() > 1 and not self._are_labels(labels):
            return False
        if labels is not None and labels.dim() == 1 and not self._are_classes(labels):
            return False
        return 0 <= int(ids.min()) <= int(ids.max()) < self._vocabulary


def is_same_update(before: Update | None, after: Update | None) -> bool:
    """Whether two updates of one group differ by no more than rounding."""
    if before is None or after is None:
        return before is after
    allowed = _SAME_ON_CUDA if before[0].is_cuda else _SAME
    size = sum(float(a.double().square().sum()) for a in before) ** 0.5
    gaps = [
        float((a.double() - b.double()).square().sum()) for a, b in zip(before, after, strict=True)
    ]
    distance = sum(gaps) ** 0.5
    # Not finite on both sides is the same: such a group counts as zero.
    return distance <= allowed * size or not math.isfinite(size)


def without_rows(group: Batch) -> Batch:
    """The group without its rows: it counts as zero."""
    return {name: tensor[:0] for name, tensor in group.items()}


def _kind(group: Batch) -> str:
    """What rows look like, and whether their labels are the tokens themselves."""
    return repr((not is_language_modelling(group), kind_of(group)))
