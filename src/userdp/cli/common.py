"""What all commands share: common options, progress bars, and how a result is printed."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from userdp.data.store import UserStore
from userdp.errors import InputError, LedgerError
from userdp.ledger.book import Ledger
from userdp.plan import Plan
from userdp.prices import marked as marked_price
from userdp.prices.earlier import Earlier
from userdp.prices.paid import Paid
from userdp.runs.files import copy_problems, run_at
from userdp.sampling import PoissonRecords, PoissonUsers, Sampler
from userdp.statement import Statement, epsilon_text
from userdp.units import Adjacency, SamplingUnit

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Unfinished = Annotated[
    bool,
    typer.Option("--unfinished", help="Read a run that is not closed, or not of these weights."),
]
Device = Annotated[str, typer.Option(help="Where the model runs: cpu, or cuda.")]
Unit = Annotated[
    SamplingUnit,
    typer.Option(help="What is sampled: whole users (ULS), or single records (ELS)."),
]
Steps = Annotated[int, typer.Option(help="Number of training steps.")]
Delta = Annotated[float, typer.Option(help="Probability mass the guarantee may miss; below 1/N.")]
GroupSize = Annotated[
    int,
    typer.Option(
        help="With --unit record: the most records any user has. Costs nothing for users."
    ),
]
AdjacencyOption = Annotated[Adjacency, typer.Option(help="Which datasets are neighbours.")]


def run_found(value: Any) -> Any:
    """The directory that was named, or the run in it if it is the output_dir of a trainer.

    What is said of the run is taken for said of the weights that lie there, so others are refused.
    """
    if value is None or run_at(Path(value)) == Path(value):
        return value
    found = run_at(Path(value))
    say(f"{value} is a trainer's output_dir: its run is {found}")
    ledger = found / "ledger.jsonl"
    if ledger.is_file() and (problems := copy_problems(Path(value), Ledger.read(ledger))):
        raise LedgerError(
            f"{problems[0]} Nothing is known of such weights. Name the run itself, {found}, or "
            "put back what the trainer wrote."
        )
    return type(value)(found)


Run = Annotated[
    Path, typer.Argument(help="Directory of a run, or a trainer's output_dir.", callback=run_found)
]


Model = Annotated[
    str,
    typer.Argument(
        help="Directory of a run, a trainer's output_dir, or a model's path or name.",
        callback=run_found,
    ),
]


def sampler_of(unit: SamplingUnit, rate: float, group_size: int) -> Sampler:
    """The sampler that --unit, --rate and --group-size describe."""
    if unit is SamplingUnit.USER:
        return PoissonUsers(user_sampling_prob=rate, group_size=group_size)
    return PoissonRecords(record_sampling_prob=rate, group_size=group_size)


def check_steps(steps: int) -> None:
    """Refuse a run of no steps."""
    if steps < 1:
        raise InputError(f"--steps {steps}: give at least one step.")


def emit(as_json: bool, payload: dict[str, Any], text: str) -> None:
    """Print the result: one JSON object, or `text` for a person."""
    print(json.dumps(payload, allow_nan=False) if as_json else text)


def promised(statement: Statement) -> dict[str, Any]:
    """What every JSON says about a run's privacy: the number, and whether it is guaranteed.

    `planned_epsilon` is what all of a user's records cost, with all its digits. So is `epsilon`,
    even if `guarantee` is false; but under a mark, which does not claim that price, it is null.
    """
    priced = statement.epsilon if statement.is_private else None
    return {
        "epsilon": None if statement.mark else priced,
        "delta": statement.delta,
        "guarantee": statement.guarantee,
        "planned_epsilon": priced,
        **marked(statement),
        "cautions": list(statement.cautions),
    }


def marked(statement: Statement) -> dict[str, Any]:
    """Why nothing is promised by choice, and what is priced instead; nothing for other runs."""
    names = ("mark", "record_level_epsilon", "hypothetical_epsilon", "as_if_epsilon")
    said = statement.to_json()
    return {name: said[name] for name in names} if statement.mark else {}


def say(message: str) -> None:
    """Print a message to stderr, beside the result."""
    print(message, file=sys.stderr)


Item = TypeVar("Item")


@contextmanager
def counting(title: str, unit: str) -> Iterator[Callable[[Iterable[Item]], Iterator[Item]]]:
    """A wrapper for iterables of unknown length that counts items on stderr as they pass."""
    console = Console(stderr=True)
    with Progress(
        SpinnerColumn(),
        TextColumn(f"{title} {{task.completed:,.0f}} {unit}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(title, total=None)

        def count(items: Iterable[Item]) -> Iterator[Item]:
            for item in items:
                yield item
                progress.advance(task)

        yield count


EPSILON_MILESTONES = 8
# Seconds between two lines of a log.
LOG_EVERY = 10.0


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
        self._began: tuple[int, float] | None = None
        self._last = clock()

    def on_step(self, done: int) -> None:
        """Show that so many steps are done; in a log not too often."""
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


@contextmanager
def training_progress(
    plan: Plan,
    title: str = "training",
    *,
    paid: Sequence[Paid] = (),
    earlier: Sequence[Earlier] = (),
    is_composed: bool = False,
    is_silent: bool = False,
) -> Iterator[TrainingProgress]:
    """The progress of a run on stderr, the epsilon of `paid` looks included.

    Where a run `is_composed` with the one that it goes on from, the plan alone does not tell what
    was spent so far. Then no epsilon is shown before the statement. Ranks that follow another are
    silent.
    """
    if is_silent:
        yield TrainingProgress(plan, paid, earlier, bar=lambda done, spent: None, is_composed=True)
        return
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


@contextmanager
def stage_progress(title: str, steps: int | None) -> Iterator[Callable[[int], None]]:
    """A line for a stage of unknown length, or a bar over `steps`, on stderr."""
    console = Console(stderr=True)
    if not console.is_terminal:
        say(title)
    with Progress(
        TextColumn(title),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(title, total=steps)
        yield lambda done: progress.update(task, completed=done)


UNCHECKED_OVERLAP = (
    "overlap of users cannot be checked: the stores hide ids under different keys, or the run's "
    "list of training users is not there. Import all stores with the same --key to check it."
)


def refuse_overlap(shared: int | None, held_out: UserStore, *, way_out: str) -> None:
    """Raise if users of `held_out` were trained on; None: not known.

    `way_out` says what the caller of this command can do.
    """
    if shared:
        raise InputError(
            f"{held_out.path}: {shared:,} of its users are training users too. {way_out}"
        )


def quiet_transformers() -> None:
    """Stop transformers from drawing its own bars while it loads and saves."""
    # Set before transformers is imported, because tqdm reads it at its first import.
    os.environ.setdefault("TQDM_DISABLE", "1")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
