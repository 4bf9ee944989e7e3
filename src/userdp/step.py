"""One private training step, for people with their own model, optimizer, data and loop.

    form groups -> one update per group -> clip -> sum -> noise -> divide by a public constant
    -> p.grad -> optimizer

This package does the sampling, the clipping, the noise and the ledger. Everything after the noise
is yours: it is post-processing and costs no privacy. Every paper's step is this one with other
parts (`plan.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NoReturn, SupportsIndex

import numpy as np
import torch
from torch import nn

from userdp.clipping.flat import ClippedSum
from userdp.clipping.rules import CLIP_RULES
from userdp.clipping.settings import StepSettings
from userdp.errors import BudgetExhaustedError, InputError, MixedExamplesError
from userdp.holding import Release, holding_of, release_of
from userdp.index import Rows, UserIndex
from userdp.ledger.book import Ledger
from userdp.losses import Batch, RecordLoss, causal_lm_loss, counted
from userdp.models.checks import check_optimizer, refuse_mixing, trainable_parameters
from userdp.noise.draw import NUMBER_PURPOSE, PURPOSE, SCORE_PURPOSE, noisy_number
from userdp.optimizers.scaled_momentum import refuse_unlearnt, update_of_run
from userdp.plan import Plan
from userdp.probe.checked_model import CheckedModel, is_same_update, without_rows
from userdp.ranks import Ranks
from userdp.ranks.agreed import Counted, agreed, with_all_apart
from userdp.ranks.alike import check_alike, check_tried, check_weights, is_check_due
from userdp.ranks.shares import dealt_by, places_of, taken
from userdp.ranks.states import of_all_ranks, of_this_rank
from userdp.runs.record import RunRecord
from userdp.runs.shared_record import begin_together, check_owner, finish_together, shared
from userdp.sampling import Cohort
from userdp.sharding.shard import computing, ending, passes_of, prepare_step
from userdp.sharding.whole import as_one_process
from userdp.statement import Statement
from userdp.streams import RunSecret


class PrivateStep:
    """Draws cohorts and turns their batches into noised gradients, one charged step at a time.

    >>> from userdp import Plan, PrivateStep, UserIndex
    >>> model, x, y = torch.nn.Linear(2, 1), torch.randn(6, 2), torch.randn(6)
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

    `sequence_length` is the largest number of tokens in a record. It is public. Before the first
    step the model is tried with made-up records of that length. Longer records count as zero. By
    default it is the number of the model's positions, but at most 128. An example that is given to
    `check_model` can raise it to the example's length.

    A Hugging Face model is tried with made-up token ids. For any other model, nothing is known
    about its rows before the first step. Its made-up rows then have the shapes that most users of a
    step have. If users' data must not have a say in this, give `check_model` a made-up example
    before the first step.

    Where the process is one of several ranks (`torchrun`), all of them take each step together.
    `draw` gives every rank its own groups of the one cohort, and the same loop works unchanged.
    Then `check_model` comes before the first step. `row_lengths` gives the number of tokens of each
    row, if they are known, so that all ranks have equally much to do.
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
        row_lengths: Rows | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        refuse_mixing(model)
        self._ranks = ranks or Ranks.found()
        self._row_lengths = row_lengths
        self._parameters = list(trainable_parameters(model).values())
        check_optimizer(optimizer, self._parameters)
        index.check_owners()
        plan.sampler.check_users(index.num_users)
        settings = settings or StepSettings()
        self._model, self._optimizer = model, optimizer
        # A sharded model runs on all ranks together; None for any other.
        self._model_passes = passes_of(model, self._ranks)
        if self._model_passes is None:
            # Adapters are drawn at random: every rank begins with those of the first.
            self._ranks.copy_from_first_(self._parameters)
        else:
            prepare_step(self._model_passes, model, plan, record_loss, settings, optimizer)
        check_alike(self._ranks, plan, model, optimizer, index, settings)
        make = partial(RunRecord.create, plan, model, optimizer, settings=settings, secret=secret)
        with as_one_process(model, self._ranks):
            self._record = shared(self._ranks, make) if record is None else record
            check_owner(self._record, self._ranks)
            # Earlier spending on these weights is composed with this run, or refused, before the
            # first step.
            begin_together(self._record, plan, model, optimizer, index)
        make_checked = partial(
            CheckedModel,
            model,
            computing(self._model_passes, self._parameters),
            plan,
            update=update_of_run(plan.update, optimizer, self._parameters),
            record_loss=record_loss,
            settings=settings,
            sequence_length=sequence_length,
            is_shared=self._ranks.count > 1,
        )
        self._checked = ending(self._model_passes, make_checked)()
        self._clip = plan.clip
        self._holding = holding_of(self._parameters, plan.noise, self._ranks)
        self._index = plan.sampler.limit_contributions(
            index, self.record.streams("limit contributions")
        )
        self._drawn: Cohort | None = None
        # Which groups of the whole cohort those drawn are.
        self._places: Rows = np.empty(0, np.int64)
        self._drawn_at, self._dealt, self._is_doubted = -1, 0, False

    # These are read-only: what a step is priced by and acts on must not be replaced during a run.

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
        """The record of the run, in which every step is charged."""
        return self._record

    @property
    def ledger(self) -> Ledger:
        """What was charged so far."""
        return self.record.ledger

    @property
    def steps_left(self) -> int:
        """How many planned steps are not yet taken."""
        return 0 if self.is_halted else self.plan.steps - self.record.steps

    @property
    def is_halted(self) -> bool:
        """Whether a step failed the plan's test, which ended the run."""
        return self.record.is_halted

    def cohorts(self) -> Iterator[Cohort]:
        """The cohort of every remaining step. Apply each one before asking for the next."""
        while self.steps_left > 0:
            yield self.draw()

    def draw(self) -> Cohort:
        """The next step's cohort: the rows of each group. Secret.

        Where there are several ranks, these are the groups of this one. It may have none.
        """
        if self.is_halted:
            raise BudgetExhaustedError(
                "the run halted: the users' gradients were not close enough to each other for its "
                "filter. Plan another run, without the filter or with a larger concentration."
            )
        if self.steps_left <= 0:
            raise BudgetExhaustedError(
                f"all {self.plan.steps:,} planned steps are taken: another would cost more than "
                "the plan allows. Plan more steps before training."
            )
        self.record.check_current(self.model)
        refuse_unlearnt(self.optimizer)
        if self._drawn is not None:
            raise InputError(
                "a cohort was drawn and not applied: leaving steps out makes the sampling other "
                "than what is accounted. Apply every cohort, empty ones too."
            )
        self._drawn_at = self.record.steps
        whole = self.plan.sampler.draw(self._index, self._drawn_at, self.record.streams("cohort"))
        self._places = places_of(whole, self._ranks.rank, self._ranks.count, self._row_lengths)
        self._dealt = dealt_by(whole, self._row_lengths) if self._ranks.count > 1 else 0
        self._drawn = taken(whole, self._places)
        return self._drawn

    def apply(self, batches: Iterable[Batch]) -> None:
        """Take one step with the cohort last drawn: one batch per group, in the cohort's order.

        An empty cohort takes a step of noise alone. It is charged like any other.
        """
        if self._drawn is None:
            raise InputError("no cohort is drawn: call draw() first, once for every step.")
        check_tried(self._ranks, self._checked, partial(ending, self._model_passes))
        cohort, could_differ = self._drawn, not self._checked.summation.differs
        try:
            # The cohort stays drawn until its batches are here: none is drawn ahead.
            groups = self._ranks.attempt(lambda: list(counted(batches, len(cohort))))
        finally:
            self._drawn = None
        with self.record.step(self._drawn_at):
            own_part = ending(self._model_passes, partial(self._own_part, cohort, groups))
            total, seen = agreed(self._ranks, own_part, dealt=self._dealt)
            if could_differ and seen.differs and self._ranks.count > 1:
                # What one rank saw of the fast path holds for all of them: its sums do not count.
                self._checked.summation.differs = True
                total, seen = agreed(self._ranks, own_part, dealt=self._dealt)
            if seen.keeps:
                self._refuse_memory()
            if could_differ and seen.differs and self.record.steps:
                # Released steps used batch shapes that were not compared, so nothing is promised
                # any more.
                self.record.doubt(
                    f"the paths were seen to differ after {self.record.steps:,} released steps"
                )
            total = with_all_apart(self._ranks, total, self._places)
            self._release(total)
        if is_check_due(self.record.steps):
            self.check_ranks()

    def _own_part(
        self, cohort: Cohort, given: Callable[[], list[Batch]]
    ) -> tuple[ClippedSum, Counted]:
        """The clipped sum of the groups drawn, and what is counted of them. Secret."""
        self.record.check_current(self.model)
        groups = self._checked.readable(given())
        if not self._checked.is_tried(cohort, groups, self._index):
            groups = [without_rows(group) for group in groups]
        before = self._checked.update_of_one(groups, self._clip)
        total = self._checked.summation.clipped_sum(groups, self._clip)
        after = self._checked.update_of_one(groups, self._clip)
        keeps = not (is_same_update(before, after) and self._checked.is_explained(total, after))
        # Reading the count waits for the device, so that is left out where nobody needs it.
        return total, Counted(
            num_within=0 if self._clip.count_stddev is None else int(total.num_within),
            num_updates=total.num_updates,
            weight=total.total_weight,
            keeps=keeps,
            differs=self._checked.summation.differs,
        )

    def check_ranks(self) -> None:
        """Raise, on every rank, if the ranks do not have the same weights, bit for bit."""
        check_weights(self._ranks, self.model)

    def _passes(self, total: ClippedSum, release: Release) -> bool:
        """Whether the step's noised score reaches the noised threshold, if the plan has a test.

        This is AboveThreshold: one noise for the threshold, and a new one for each score. The test
        is paid for once, whatever it answers (Chua et al. 2024, Alg. 3, line 9).
        """
        test = self.plan.halting_test
        if test is None:
            return True
        assert total.concentration is not None
        # Taken again, the test has the noise that it had: it must be of the same score and sum.
        release.settle_at_once(self._ranks, total.total.values)
        return test.passes(
            total.concentration,
            on_threshold=float(self.record.streams("threshold of a test").rng(0).laplace()),
            on_score=float(self.record.streams(SCORE_PURPOSE).rng(release.step).laplace()),
        )

    def _refuse_memory(self) -> None:
        """The loss or the model gave one group two updates: it keeps something of other groups."""
        what = (
            "the loss or the model keeps something of one group for the next, outside its modules"
        )
        if not self.record.steps:
            raise MixedExamplesError(f"{what}. It cannot be trained with a guarantee.")
        if not self._is_doubted:
            self._is_doubted = True
            self.record.doubt(f"{what}: seen after {self.record.steps:,} released steps")

    def check_model(self, example: Batch | None = None) -> None:
        """Raise if one user can move the clipped sum by more than the clip norm (`probe`).

        The check runs once, with made-up rows. `apply` runs it before the first step, unless it has
        run already. The rows are token ids for a Hugging Face model; for other models they look
        like those of `example`. The example is public, so make it up. If `sequence_length` was not
        given, rows may be as long as the example's.
        """
        ending(self._model_passes, partial(self._checked.check_model, example))()

    def _release(self, total: ClippedSum) -> None:
        """Charge, test, add noise to the sum, divide, take the step: all that leaves."""
        release = release_of(
            self.plan,
            self._clip,
            total,
            step=self.record.steps,
            streams=self.record.streams(PURPOSE),
            sums=self.record.sums,
            is_repeated=self.record.is_repeating,
        )
        # The charge is on disk before anyone can see a weight of this step. Other ranks cannot have
        # one before: their sum needs what the first rank adds after its charge.
        self.record.charge_step()
        if not self._passes(total, release):
            self.record.halt()
            return
        self._holding.set_gradients(total, release)
        self.optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        self._clip = self._clip.following(self._noisy_share_within(total, release.step))

    def _noisy_share_within(self, total: ClippedSum, step: int) -> float | None:
        """The noised share of updates within the clip norm; None if the rule does not ask for it.

        This count is priced like everything else that is released.
        """
        if self._clip.count_stddev is None:
            return None
        # Subtract half of the number of updates: one update then moves the count by 1/2, not by 1.
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
        """The clip norm of the next step: the plan's, or the current one of an adaptive rule."""
        return self._clip.clip_norm

    def state_dict(self) -> dict[str, Any]:
        """What the next step needs beside the model, the optimizer and the record. Secret.

        Samplers and streams have no state: the number of the step is enough. All ranks ask for it
        together, and all get the same.
        """
        return {
            "step": self.record.steps,
            "clip": CLIP_RULES.to_json(self._clip),
            "noise": self._holding.state_dict(),
            "model": of_all_ranks(self._ranks, self._checked.state_dict()),
            "doubted": self._is_doubted,
        }

    def load_state_dict(self, state: dict[str, Any], example: Batch | None = None) -> None:
        """Continue from a `state_dict` that was taken after as many steps as are recorded.

        `example` is what `check_model` was given.
        """
        if self._drawn is not None or state["step"] != self.record.steps:
            raise InputError(
                f"the state is that of step {state['step']}, and the record has "
                f"{self.record.steps} steps: they must be of the same moment."
            )
        clip = CLIP_RULES.from_json(state["clip"])
        if clip.at(self._clip.clip_norm) != self._clip:
            raise InputError("the state is that of a step with another clip rule.")
        self._clip = clip
        self._holding.load_state_dict(state["noise"])
        own = of_this_rank(self._ranks, state["model"])
        ending(self._model_passes, partial(self._checked.load_state_dict, own, example))()
        self._is_doubted = state["doubted"]

    def statement(self) -> Statement:
        """What may be said about the model. From the first step on, the whole plan is priced."""
        return self.record.statement()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a private step cannot be copied: both copies would draw the same noise.")

    def finish(self) -> None:
        """Close the ledger with the digest of the current weights. No step can follow."""
        self.check_ranks()
        with as_one_process(self.model, self._ranks):
            finish_together(self.record, self.model)
