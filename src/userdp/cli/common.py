"""What all commands share: common options, progress bars, and how a result is printed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from userdp.data.store import UserStore
from userdp.errors import InputError, LedgerError
from userdp.ledger.book import Ledger
from userdp.runs.files import copy_problems, run_at
from userdp.statement import Statement
from userdp.training.progress import say as say
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
