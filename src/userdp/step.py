"""The private step, alone: for people with their own model, optimizer, data and loop.

    form groups -> one update per group -> clip -> sum -> noise -> divide by a public constant
    -> p.grad -> optimizer

Ours: the sampling, the clipping, the noise, the ledger. Yours: everything after the noise, which is
post-processing and costs nothing. Every paper's step is this one with other parts (`plan.py`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from userdp.clipping.batches.users import is_padded
from userdp.clipping.flat import ClippedSum
from userdp.clipping.rules import CLIP_RULES
from userdp.clipping.settings import StepSettings
from userdp.clipping.summation import summation
from userdp.errors import BudgetExhaustedError, InputError, UntriedModelError
from userdp.index import UserIndex
from userdp.ledger import Ledger
from userdp.losses import Batch, RecordLoss, causal_lm_loss
from userdp.models.checks import check_optimizer, refuse_mixing, trainable_parameters
from userdp.models.proven import is_proven, ways_of
from userdp.noise.draw import NUMBER_PURPOSE, PURPOSE, noisy_number
from userdp.plan import Plan
from userdp.probe import check_model, is_language_modelling, usual_length, vocabulary_of
from userdp.run_record import RunRecord
from userdp.sampling import Cohort
from userdp.statement import Statement
from userdp.streams import RunSecret

# Users on rows like whose the model may fail before that is an error.
_MOST_UNTRIED = 8
# What rows hold where no example says it.
TOKENS = ("input_ids", "labels")
_LOG = logging.getLogger(__name__)


class PrivateStep:
    """Draws cohorts and turns their batches into noised gradients, one charged step at a time.

    >>> from userdp import Plan, PrivateStep, UserIndex
    >>> model = torch.nn.Linear(2, 1)
    >>> x, y = torch.randn(6, 2), torch.randn(6)
    >>> plan = Plan.sample_users(num_users=3, expected_cohort_size=2, group_size=2, steps=5,
    ...                          clip_norm=1.0, epsilon=8.0, delta=1e-2)
    >>> step = PrivateStep(
    ...     model, torch.optim.SGD(model.parameters(), lr=0.1), plan,
    ...     UserIndex.from_owners(["ann", "ann", "bob", "bob", "cy", "cy"]),
    ...     record_loss=lambda model, batch: (model(batch["x"])[:, 0] - batch["y"]) ** 2,
    ... )
    >>> for cohort in step.cohorts():
    ...     step.apply({"x": x[rows], "y": y[rows]} for rows in cohort)
    >>> step.statement().steps
    5

    `sequence_length` is the most tokens a record may have, a public number: the model is tried with
    made-up records of that length before the first step, and longer ones count as zero. Without it,
    it is the number of the model's positions, at most 128, or the length of the example that
    `check_model` is given.

    A Hugging Face model is tried with made-up token ids. Of any other model's rows nothing is known
    before the first step: they are made up in the shapes that most users of a step have. Give
    `check_model` a made-up example before the first step, and no user has a say in it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        index: UserIndex,
        *,
        record_loss: RecordLoss = causal_lm_loss,
        settings: StepSettings | None = None,
        sequence_length: int | None = None,
        record: RunRecord | None = None,
        secret: RunSecret | None = None,
    ) -> None:
        refuse_mixing(model)
        self._parameters = list(trainable_parameters(model).values())
        check_optimizer(optimizer, self._parameters)
        settings = settings or StepSettings()
        self._model = model
        self._optimizer = optimizer
        self._record = record or RunRecord.create(
            plan, model, optimizer, settings=settings, secret=secret
        )
        # What was spent on these weights before is composed, or refused, before the first step.
        self.record.begin(plan, model, optimizer, index)
        self._new_summation = partial(
            summation,
            model,
            self._parameters,
            plan.update,
            plan.clip,
            record_loss=record_loss,
            settings=settings,
            sequence_length=sequence_length,
        )
        # Of other models nobody knows in which batches rows see each other.
        self._summation = self._new_summation(every_shape=not is_proven(model))
        self._check = partial(
            check_model,
            model,
            group_size=plan.sampler.rows_in_a_group,
            record_loss=record_loss,
            update=plan.update,
            rule=plan.clip,
            settings=settings,
        )
        self._is_checked = False
        # With what the model was checked (secret), and how it computed then.
        self._example: Batch | None = None
        self._ways: list[Any] = []
        # Users on rows like whose the model failed. Secret.
        self._untried: set[int] = set()
        # One public length, fixed before the first step: what was not tried is not admitted.
        self._is_length_given = sequence_length is not None
        self._longest = sequence_length or usual_length(model)
        self._vocabulary = vocabulary_of(model)
        self._clip = plan.clip
        self._noise = plan.noise.started()
        self._index = plan.sampler.limit_contributions(
            index, self.record.streams("limit contributions")
        )
        self._drawn: Cohort | None = None

    # What a step is priced by and acts on cannot be replaced while it runs.

    @property
    def plan(self) -> Plan:
        """The plan that is charged."""
        return self.record.ledger.plan

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that takes the noised gradients."""
        return self._optimizer

    @property
    def record(self) -> RunRecord:
        """Where every step is charged."""
        return self._record

    @property
    def ledger(self) -> Ledger:
        """What was charged so far."""
        return self.record.ledger

    @property
    def steps_left(self) -> int:
        """How many planned steps are not yet taken."""
        return self.plan.steps - self.record.steps

    def cohorts(self) -> Iterator[Cohort]:
        """Every remaining step's cohort; apply each before asking for the next."""
        while self.steps_left > 0:
            yield self.draw()

    def draw(self) -> Cohort:
        """The next step's cohort: the rows of each group. Secret."""
        if self.steps_left <= 0:
            raise BudgetExhaustedError(
                f"all {self.plan.steps:,} planned steps are taken: another would cost more than "
                "the plan allows. Plan more steps before training."
            )
        self.record.check_current(self.model)
        if self._drawn is not None:
            raise InputError(
                "a cohort was drawn and not applied: leaving steps out makes the sampling other "
                "than what is accounted. Apply every cohort, empty ones too."
            )
        self._drawn = self.plan.sampler.draw(
            self._index, self.record.steps, self.record.streams("cohort")
        )
        return self._drawn

    def apply(self, batches: Iterable[Batch]) -> None:
        """Take one step with one batch per group of the cohort last drawn, in its order.

        An empty cohort takes a step of noise alone, and is charged like any other.
        """
        if self._drawn is None:
            raise InputError("no cohort is drawn: call draw() first, once for every step.")
        cohort, self._drawn = self._drawn, None
        groups = list(_counted(batches, len(cohort)))
        groups = self._readable(groups)
        self._check_changed()
        if not self._is_checked and not self._is_tried(cohort, groups):
            groups = [_without_rows(group) for group in groups]
        could_differ = not self._summation.differs
        total = self._summation.clipped_sum(groups, self._clip)
        if could_differ and self._summation.differs and self.record.steps:
            # Steps in shapes that were not compared are out already: nothing more is promised.
            self.record.doubt(
                f"the paths were seen to differ after {self.record.steps:,} released steps"
            )
        self._release(total)

    def check_model(self, example: Batch | None = None) -> None:
        """Raise if one user can move the clipped sum by more than the clip norm (`probe`).

        Runs once, with made-up rows; `apply` runs it before the first step unless it has run. Rows
        are token ids for a Hugging Face model, else like those of `example`, which is public: make
        it up. Where `sequence_length` was not given, rows may be as long as the example's.
        """
        if self._is_checked:
            return
        if not self._is_length_given:
            self._longest = usual_length(self.model, example)
        self._probe(example)

    def _check_changed(self) -> None:
        """Check the model again if its mode, a hook or a method changed since it was checked."""
        if not self._is_checked or ways_of(self.model) == self._ways:
            return
        # What was compared and captured was so in the old way.
        differed = self._summation.differs
        self._summation = self._new_summation(every_shape=not is_proven(self.model))
        self._summation.differs = differed
        self._probe(self._example)

    def _probe(self, example: Batch | None) -> None:
        self._example, self._ways = example, ways_of(self.model)
        self._is_checked = self._check(example, sequence_length=self._longest)
        if self._is_checked and not self._is_length_given and "input_ids" in (example or TOKENS):
            self._is_length_given = True
            _LOG.warning(
                "sequence_length is not given: records of more than %d tokens count as zero.",
                self._longest,
            )
        # From here on a group that fails does so because of its own data.
        self._summation.skip_failing = self._is_checked

    def _is_tried(self, cohort: Cohort, groups: Sequence[Batch]) -> bool:
        """Whether the model is checked, with rows like those of a group if need be.

        One user's data must not decide whether a run goes on. So every user has one vote on what
        rows look like, and the kind of most users is tried first; a model that fails on a group is
        tried on the next. Where it fails on every group, each of them counts as zero, as it would
        by itself, and the next step tries again; an error comes once many users' rows have failed.
        A verdict on the model is never passed over.
        """
        owners = self._index.owner_of_rows()
        examples = [
            (_kind(group), int(owners[rows[0]]), group)
            for rows, group in zip(cohort, groups, strict=True)
            if len(rows) and len(next(iter(group.values())))
        ]
        votes = Counter(kind for kind, _ in {(kind, user) for kind, user, _ in examples})
        for _, user, example in sorted(examples, key=lambda item: (-votes[item[0]], item[0])):
            try:
                self._probe(example)
                return True
            except UntriedModelError:
                self._untried.add(user)
                if len(self._untried) >= min(_MOST_UNTRIED, max(2, self.plan.num_users // 2)):
                    raise
        if examples:
            _LOG.warning("the model fails on rows like those of a step: all count as zero.")
        return not examples

    def _readable(self, groups: list[Batch]) -> list[Batch]:
        """The groups; those that cannot be read lose their rows, so that they count as zero."""
        read = [self._reads(group) for group in groups]
        if groups and not any(read):
            _LOG.warning(
                "no group of a step can be read: tokens beyond the vocabulary, rows longer than "
                "sequence_length=%d, or tensors that do not fit together.",
                self._longest,
            )
        return [
            group if can_read else _without_rows(group)
            for group, can_read in zip(groups, read, strict=True)
        ]

    def _reads(self, group: Batch) -> bool:
        """Whether the group's tensors fit together and its tokens are known.

        On a GPU a token beyond the vocabulary would end the process.
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
        if labels is not None and labels.dim() > 1 and labels.shape != ids.shape:
            return False
        if self._vocabulary is None:
            return True
        if labels is not None and labels.dim() > 1 and int(labels.max()) >= self._vocabulary:
            return False
        return 0 <= int(ids.min()) <= int(ids.max()) < self._vocabulary

    def _release(self, total: ClippedSum) -> None:
        """Noise the clipped sum, divide, step: everything that leaves the private side."""
        step = self.record.steps
        values = total.total.values
        self._noise.add_(
            values,
            offset=0,
            size=len(values),
            noise_stddev=self.plan.noise_stddev_of(self._clip),
            step=step,
            streams=self.record.streams(PURPOSE),
        )
        # On disk before any weight of this step can be seen.
        self.record.charge_step()
        # Divide by E|U|, not |U|: the realised cohort size is secret (C24 Alg. 2).
        values /= self.plan.divisor
        for parameter, value in zip(self._parameters, total.total.views, strict=True):
            parameter.grad = value.to(parameter.dtype)
        self.optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        self._clip = self._clip.following(self._noisy_share_within(total, step))

    def _noisy_share_within(self, total: ClippedSum, step: int) -> float | None:
        """The share of updates within the clip norm, if the rule asks for it: a priced count."""
        if self._clip.count_stddev is None:
            return None
        # Centred at half of what is expected: one update then moves the count by 1/2, not 1.
        centred = float(total.num_within) - 0.5 * total.num_updates
        noisy = noisy_number(
            centred,
            noise_stddev=self._clip.count_stddev,
            streams=self.record.streams(NUMBER_PURPOSE),
            step=step,
        )
        return noisy / self.plan.divisor + 0.5

    @property
    def clip_norm(self) -> float:
        """The clip norm of the next step: the plan's, or what an adaptive rule has come to."""
        return self._clip.clip_norm

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on beside the model, the optimizer and the record. Secret.

        Samplers and streams have no state: the number of the step is enough.
        """
        return {
            "step": self.record.steps,
            "clip": CLIP_RULES.to_json(self._clip),
            "noise": self._noise.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave after as many steps as are recorded."""
        if self._drawn is not None or state["step"] != self.record.steps:
            raise InputError(
                f"the state is that of step {state['step']}, and the record has "
                f"{self.record.steps} steps: they must be of the same moment."
            )
        clip = CLIP_RULES.from_json(state["clip"])
        if clip.at(self._clip.clip_norm) != self._clip:
            raise InputError("the state is that of a step with another clip rule.")
        self._clip = clip
        self._noise.load_state_dict(state["noise"])

    def statement(self) -> Statement:
        """What may be said about the model after the steps taken so far."""
        return self.record.statement()

    def finish(self) -> None:
        """Close the ledger with the digest of the weights as they are: no step can follow."""
        self.record.finish(self.model)


def _without_rows(group: Batch) -> Batch:
    return {name: tensor[:0] for name, tensor in group.items()}


def _kind(group: Batch) -> str:
    """What rows look like: names, dtypes and shapes, but for the number and length of rows."""
    shapes = sorted(
        (name, str(tensor.dtype), tuple(tensor.shape[2 if is_padded(name, tensor) else 1 :]))
        for name, tensor in group.items()
    )
    return repr((not is_language_modelling(group), shapes))


def _counted(batches: Iterable[Batch], expected: int) -> Iterator[Batch]:
    """The batches; raises at their end if they are not as many as the groups drawn."""
    count = 0
    for batch in batches:
        count += 1
        yield batch
    if count != expected:
        raise InputError(
            "the number of batches is not the number of groups drawn: give one batch per group."
        )
