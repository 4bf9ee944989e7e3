"""Whether a run's record is whole, closed and of these weights: everything that can be compared.

The check reads the run's directory and nothing else. It needs no torch. It also reads a directory
that `userdp export` wrote; there the model's files lie beside the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from userdp.errors import InputError
from userdp.files.lock import Owner, lock_path
from userdp.history import ANCESTRY_FILE, read_history
from userdp.ledger.book import Ledger
from userdp.ledger.rows import UNVERIFIED
from userdp.runs.files import (
    config_problems,
    copy_problems,
    is_statement_file,
    model_directory,
    problems_of,
    record_at,
    rewritten_files,
    run_at,
)


@dataclass(frozen=True, kw_only=True)
class RunCheck:
    """What was found in a run's directory.

    `problems` are reasons not to trust the record; `notes` are things to know about a record that
    is as it should be. `ledger` is None if it cannot be read.
    """

    run: Path
    ledger: Ledger | None
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the record is whole, closed and of these weights."""
        return not self.problems

    @property
    def steps(self) -> int | None:
        """How many steps are recorded; None if that cannot be read."""
        return None if self.ledger is None else self.ledger.steps

    @property
    def earlier_steps(self) -> int:
        """How many steps of earlier runs are composed with those of this record."""
        return 0 if self.ledger is None else sum(item.steps for item in self.ledger.earlier)

    @property
    def closed(self) -> bool:
        """Whether the closing row is there."""
        return self.ledger is not None and self.ledger.is_finished

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "run": str(self.run),
            "ok": self.ok,
            "steps": self.steps,
            "earlier_steps": self.earlier_steps,
            "closed": self.closed,
            "problems": list(self.problems),
            "notes": list(self.notes),
        }


def check_place(place: Path) -> RunCheck:
    """The same of a run, a merged export, or a trainer's output_dir with its run and weights."""
    run = run_at(place)
    record = record_at(place)
    if run == place and record != place:
        problem = (
            f"{place} is a merged export: the ledger in {record} names the adapter and not these "
            f"weights. Verify {record}, and merge it with its base again to compare them."
        )
        return RunCheck(run=place, ledger=None, problems=(problem,))
    found = check_run(run)
    if run == place or found.ledger is None:
        return found
    note = f"{place} is a trainer's output_dir: its run is {run}"
    problems = (*found.problems, *copy_problems(place, found.ledger))
    return replace(found, problems=problems, notes=(*found.notes, note))


def check_run(run: Path) -> RunCheck:
    """Check everything that a run's directory says about itself. It raises for no content."""
    try:
        ledger = Ledger.read(run / "ledger.jsonl")
    except InputError as error:
        return RunCheck(run=run, ledger=None, problems=(str(error),))
    except OSError as error:
        problem = f"{run / 'ledger.jsonl'} cannot be read: {error.strerror}."
        return RunCheck(run=run, ledger=None, problems=(problem,))
    notes = [] if ledger.is_verified else [f"{UNVERIFIED}."]
    problems: list[str] = []
    for check in (_model_files, _ancestry, _config, _statement):
        try:
            problems += check(run, ledger, notes)
        except InputError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{error.filename} cannot be read: {error.strerror}.")
    if not ledger.is_finished and (owner := Owner.read(lock_path(run / "ledger.jsonl"))):
        notes.append(f"the ledger was last opened by {owner}.")
    return RunCheck(run=run, ledger=ledger, problems=tuple(problems), notes=tuple(notes))


def _model_files(run: Path, ledger: Ledger, notes: list[str]) -> list[str]:
    notes += [
        f"{name} is not the file that the run wrote: an export changes the base's name in it, and "
        "nothing here shows that it changed nothing else."
        for name in rewritten_files(run, ledger)
    ]
    return problems_of(run, ledger)


def _ancestry(run: Path, ledger: Ledger, _: list[str]) -> list[str]:
    """The model's own file about its past must say what the ledger says."""
    end = ledger.end
    directory = model_directory(run)
    if end is None or directory is None or ANCESTRY_FILE not in end["model_files"]:
        return []
    history = read_history(directory)
    found = () if history is None else history.entries
    latest = ledger.as_entry()
    recorded = [item.to_json() for item in ledger.earlier] + ([latest] if latest else [])
    is_same = len(found) == len(recorded) and all(map(_says_as_much, found, recorded))
    if not is_same:
        return [f"{directory / ANCESTRY_FILE} does not say what the ledger says was spent."]
    return []


def _says_as_much(found: dict[str, Any], recorded: dict[str, Any]) -> bool:
    # A doubt about an earlier run may have come up after this run had recorded it.
    more: dict[str, Any] = {"doubts": found.get("doubts")} if found.get("doubts") else {}
    # Older files do not say whether rows were chosen. The closing row names their digest.
    recorded = {n: v for n, v in recorded.items() if n != "chose_rows" or n in found}
    return found == recorded | more and set(recorded.get("doubts", ())) <= set(
        more.get("doubts", ())
    )


def _config(run: Path, ledger: Ledger, _: list[str]) -> list[str]:
    return config_problems(run, ledger)


def _statement(run: Path, ledger: Ledger, notes: list[str]) -> list[str]:
    path = run / "statement.json"
    if not path.is_file():
        if ledger.is_finished:
            notes.append("there is no statement.json: userdp report writes it.")
        return []
    incomplete = bool(problems_of(run, ledger))
    statement = ledger.statement(unfinished=incomplete)
    if not statement.guarantee:
        notes.append(statement.sentence)
    if is_statement_file(path.read_bytes(), statement):
        return []
    return [
        f"{path} is not what the ledger says: it was edited, or another version of userdp wrote "
        "it. userdp report writes it again."
    ]
