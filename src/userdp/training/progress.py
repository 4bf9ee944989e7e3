"""How far a run is, for whoever watches it: a bar on a terminal, lines in a log or a notebook.

What is shown is public but for the time: how long steps took tells how many users took part.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from userdp.plan import Plan
from userdp.prices import marked as marked_price
from userdp.prices.earlier import Earlier
from userdp.prices.paid import Paid
from userdp.statement import epsilon_text

EPSILON_MILESTONES = 8
# Seconds between two lines of a log.
LOG_EVERY = 10.0


def say(message: str) -> None:
    """Print a message to stderr, beside the result."""
    print(message, file=sys.stderr)


class TrainingProgress:
    """How far a run is, its epsilon and the time left: a bar on a terminal, lines in a log.

    Epsilon takes a moment to evaluate, so it is known at a few step counts only. What is shown is
    the value at the next of them, which is never less than what was spent.
    """

    def __init__(
        self,
        plan: Plan,
        paid: Sequence[Paid],
        earlier: Sequence[Earlier],
        bar: Callable[[int, str], None] | None,
        is_composed: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._paid, self._earlier = paid, earlier
        self._bar = bar
        self._shows_epsilon = not plan.non_private and not is_composed
        self._clock = clock
        self._shown: dict[int, str] = {}
        # The steps of the runs that this one goes on from. The plan counts them, and this run's own
        # numbers do not.
        self._before = 0
        self._began: tuple[int, float] | None = None
        self._last = clock()

    def on_begin(self, before: int, done: int) -> None:
        """Say where a run goes on: after those `before` it, and `done` steps of its own."""
        self._before = before
        if before + done:
            say(f"goes on after step {before + done:,} of {self._plan.steps:,}")

    def on_step(self, done: int) -> None:
        """Show that so many steps are done; in a log not too often."""
        done += self._before
        if self._bar is not None:
            self._bar(done, self._spent(done))
            return
        now = self._clock()
        # The first step of a process compiles and checks, so the time left is told by the others.
        self._began = self._began or (done, now)
        if now - self._last >= LOG_EVERY:
            self._last = now
            say(self._line(done, now))

    def note(self, done: int, words: str) -> None:
        """Show something that was found after `done` steps."""
        done += self._before
        if self._bar is None:
            self._last = self._clock()
            say(f"{self._line(done, self._last)}, {words}")
        else:
            say(f"step {done:,}: {words}")

    def _line(self, done: int, now: float) -> str:
        parts = [f"step {done:,}/{self._plan.steps:,}"]
        if done:
            parts += [self._spent(done)] if self._spent(done) else []
        if self._began is not None and done > self._began[0]:
            each = (now - self._began[1]) / (done - self._began[0])
            parts.append(f"{_duration(each * (self._plan.steps - done))} left")
        return ", ".join(parts)

    def _spent(self, done: int) -> str:
        if not self._shows_epsilon:
            return ""
        part = max(1, -(-done * EPSILON_MILESTONES // self._plan.steps))
        milestone = -(-self._plan.steps * min(part, EPSILON_MILESTONES) // EPSILON_MILESTONES)
        if milestone not in self._shown:
            spent, in_all = self._epsilon(milestone), self._epsilon(self._plan.steps)
            mark = self._plan.mark
            name = "epsilon" if mark is None else mark.epsilon_name
            self._shown[milestone] = (
                f"{name} <= {epsilon_text(spent)} of {epsilon_text(in_all)}"
                if math.isfinite(in_all)
                else f"no finite {name}"
            )
        return self._shown[milestone]

    def _epsilon(self, steps: int) -> float:
        """Epsilon after so many steps; under a mark, of what the mark prices."""
        before: Any = {"paid": self._paid, "earlier": self._earlier}
        marked = marked_price.epsilon_of(self._plan, steps, **before)
        return self._plan.epsilon(steps, **before) if marked is None else marked


def _duration(seconds: float) -> str:
    """A time in words, in the unit that suits it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class NoProgress:
    """Shows nothing: somebody else does, or follows another rank."""

    def on_begin(self, before: int, done: int) -> None:
        """Nobody watches."""

    def on_step(self, done: int) -> None:
        """Nobody watches."""

    def note(self, done: int, words: str) -> None:
        """Nobody watches."""


@contextmanager
def training_progress(
    plan: Plan,
    title: str = "training",
    *,
    paid: Sequence[Paid] = (),
    earlier: Sequence[Earlier] = (),
    is_composed: bool = False,
) -> Iterator[TrainingProgress]:
    """The progress of a run on stderr, the epsilon of `paid` looks included.

    Where a run `is_composed` with the one that it goes on from, the plan alone does not tell what
    was spent so far. Then no epsilon is shown before the statement.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        say(title)
        yield TrainingProgress(plan, paid, earlier, bar=None, is_composed=is_composed)
        return
    with Progress(
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[spent]}"),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        task = progress.add_task(title, total=plan.steps, spent="")
        yield TrainingProgress(
            plan,
            paid,
            earlier,
            bar=lambda done, spent: progress.update(task, completed=done, spent=spent),
            is_composed=is_composed,
        )
