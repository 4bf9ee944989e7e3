"""A run that ends before its last planned step: what it costs, and what its statement says.

Whoever decides to stop may have looked at the weights, and so at the users. What the whole plan
costs covers every such decision, because it is post-processing of the whole run. What the steps
taken cost does not: a bound at a time that is chosen on the way needs more (Rogers et al. 2016,
"Privacy Odometers and Filters"). So the planned steps that are not taken are charged, too. The same
holds for every other end: a run that is given up, forked or halted, a copy of its weights that is
taken on the way, and a loop of one's own (`Ledger.priced_steps`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from userdp.report.closing import write_words
from userdp.runs.files import RecordedRun
from userdp.runs.record import RunRecord

DRY_RUN = "this was a dry run: every step was charged and nothing was trained, so it has no model"


def charge_all(record: RunRecord, people: dict[str, Any]) -> None:
    """Charge for every planned step and close the ledger, with nothing trained."""
    people = {**people, "cautions": [DRY_RUN, *people.get("cautions", ())]}
    for _ in range(record.ledger.plan.steps):
        record.charge_step(of_rest=True)
        record.step_done()
    record.ledger.finish({}, people=people)
    if record.path is not None:
        write_words(RecordedRun(run=record.path, ledger=record.ledger))


class EarlyEnd:
    """Asks after each step whether to stop, and charges for the rest if so."""

    def __init__(self, record: RunRecord, asked: Callable[[], bool] | None) -> None:
        self._record = record
        self._asked = asked

    @property
    def was_asked(self) -> bool:
        """Whether the run ended here before it was stopped: its ledger has some of the rest.

        None of the rest is taken after all. Its rows could not tell how often it was.
        """
        ledger = self._record.ledger
        return self._record.steps == ledger.steps_begun < ledger.steps

    @property
    def is_asked(self) -> bool:
        """Whether the training shall end here, before the last planned step."""
        planned = self._record.ledger.plan.steps
        is_over = self._record.is_halted or self._record.steps >= planned
        is_asked = self._asked is not None and not is_over and self._asked()
        # After a step that is taken again the answer was no, or some of the rest is charged.
        return self.was_asked if self._record.is_repeating else is_asked

    def charge_rest(self) -> None:
        """Charge for all planned steps that are left."""
        while self._record.steps < self._record.ledger.plan.steps:
            self._record.charge_step(of_rest=True)

    def told(self, people: dict[str, Any]) -> dict[str, Any]:
        """What the closing row says beside the steps, with the early end among the cautions."""
        ledger = self._record.ledger
        if ledger.steps_begun == ledger.steps:
            return people
        caution = (
            f"training stopped after {ledger.steps_begun:,} of {ledger.steps:,} planned steps; all "
            "of them are charged, because the decision to stop may depend on the weights"
        )
        return {**people, "cautions": [*people.get("cautions", ()), caution]}
