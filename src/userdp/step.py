"""The private step, alone: for people with their own model, optimizer, data and loop.

    form groups -> one update per group -> clip -> sum -> noise -> divide by a public constant
    -> p.grad -> optimizer

Ours: the sampling, the clipping, the noise, the ledger. Yours: everything after the noise, which is
post-processing and costs nothing. Every paper's step is this one with other parts (`plan.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from userdp.clipping.plain import clipped_sum
from userdp.errors import BudgetExhaustedError, InputError
from userdp.index import UserIndex
from userdp.ledger import Ledger
from userdp.models.checks import (
    BufferGuard,
    check_optimizer,
    refuse_mixing,
    trainable_parameters,
)
from userdp.noise.draw import add_gaussian
from userdp.noise.secret import RunSecret
from userdp.plan import Plan
from userdp.sampling import Cohort
from userdp.statement import Statement
from userdp.updates import Batch, RecordLoss, Update, causal_lm_loss, mean_gradient


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
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        index: UserIndex,
        *,
        record_loss: RecordLoss = causal_lm_loss,
        microbatch_records: int | None = None,
        ledger: Ledger | None = None,
        secret: RunSecret | None = None,
    ) -> None:
        refuse_mixing(model)
        self._parameters = list(trainable_parameters(model).values())
        check_optimizer(optimizer, self._parameters)
        self.model = model
        self.optimizer = optimizer
        self.plan = plan
        secret = secret or RunSecret.from_system()
        self.ledger = ledger or Ledger.create(plan, bound_to={}, fixed_seed=secret.fixed_seed)
        if self.ledger.plan != plan or self.ledger.fixed_seed != secret.fixed_seed:
            raise InputError("the ledger was opened for another plan or another kind of seed.")
        self._secret = secret.bound_to(self.ledger.run_digest)
        self._record_loss = record_loss
        self._microbatch_records = microbatch_records
        self._index = plan.sampler.limit_contributions(
            index, self._secret.rng("limit contributions", 0)
        )
        self._drawn: Cohort | None = None

    @property
    def steps_left(self) -> int:
        """How many planned steps are not yet taken."""
        return self.plan.steps - self.ledger.steps

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
        if self._drawn is not None:
            raise InputError(
                "a cohort was drawn and not applied: leaving steps out makes the sampling other "
                "than what is accounted. Apply every cohort, empty ones too."
            )
        self._drawn = self.plan.sampler.draw(
            self._index, self._secret.rng("cohort", self.ledger.steps)
        )
        return self._drawn

    def apply(self, batches: Iterable[Batch]) -> None:
        """Take one step with one batch per group of the cohort last drawn, in its order.

        An empty cohort takes a step of noise alone, and is charged like any other.
        """
        if self._drawn is None:
            raise InputError("no cohort is drawn: call draw() first, once for every step.")
        cohort, self._drawn = self._drawn, None
        guard = BufferGuard(self.model)
        total = clipped_sum(
            self._updates(batches, expected=len(cohort)), self.plan.clip, like=self._parameters
        )
        guard.check()
        self._release(total)

    def _updates(self, batches: Iterable[Batch], *, expected: int) -> Iterator[Update]:
        count = 0
        for batch in batches:
            count += 1
            yield mean_gradient(
                self.model,
                self._parameters,
                batch,
                record_loss=self._record_loss,
                microbatch_records=self._microbatch_records,
            )
        if count != expected:
            raise InputError(
                "the number of batches is not the number of groups drawn: give one batch per group."
            )

    def _release(self, total: Update) -> None:
        """Noise the clipped sum, divide, step: everything that leaves the private side."""
        step = self.ledger.steps
        noised = add_gaussian(
            total, noise_stddev=self.plan.noise_stddev, secret=self._secret, step=step
        )
        # On disk before any weight of this step can be seen.
        self.ledger.charge_step()
        for parameter, value in zip(self._parameters, noised, strict=True):
            # Divide by E|U|, not |U|: the realised cohort size is secret (C24 Alg. 2).
            parameter.grad = (value / self.plan.divisor).to(parameter.dtype)
        self.optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None

    def statement(self) -> Statement:
        """What may be said about the model after the steps taken so far."""
        return self.ledger.statement()
