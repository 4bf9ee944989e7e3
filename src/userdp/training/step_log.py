"""How far a run is, for `userdp.train`: a bar on a terminal, else lines of the `logging` module.

Each line has public numbers only: the step, what was spent so far, and seconds. How long steps took
tells how many users took part in them, so a log is for the run's owner.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from userdp.runs.record import RunRecord
from userdp.statement import epsilon_text
from userdp.training.progress import is_terminal, training_progress
from userdp.training.watching import epsilon_spent

_LOG = logging.getLogger(__name__)
# Lines of a run, about. Each evaluates epsilon, which takes a moment.
LINES = 20


class StepLog:
    """A line every few steps, and one after the last."""

    def __init__(self, record: RunRecord, clock: Callable[[], float] = time.monotonic) -> None:
        self._record = record
        self._clock = clock
        self._began = clock()
        self._steps = record.ledger.plan.steps
        self._every = math.ceil(self._steps / LINES)

    def step_done(self) -> None:
        """Log a line if one is due."""
        done = self._record.steps
        is_due = done % self._every == 0 or done == self._steps
        if not is_due or not _LOG.isEnabledFor(logging.INFO):
            return
        found = epsilon_spent(self._record.ledger, done)
        spent = "".join(f", epsilon {epsilon_text(value)}" for value in found.values())
        seconds = self._clock() - self._began
        _LOG.info("step %s/%s%s, %.0f s", f"{done:,}", f"{self._steps:,}", spent, seconds)


@contextmanager
def shown(record: RunRecord) -> Iterator[Callable[[], None]]:
    """What is called after each step, for whoever gives no `on_step`: a bar, or the log's lines."""
    if not is_terminal():
        yield StepLog(record).step_done
        return
    ledger = record.ledger
    with training_progress(ledger.plan, paid=ledger.paid, earlier=ledger.earlier) as progress:
        yield lambda: progress.on_step(record.steps)
