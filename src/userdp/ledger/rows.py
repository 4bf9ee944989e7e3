"""Which rows a ledger has, in which order, and what of them is kept in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from userdp.errors import LedgerError
from userdp.files.chain import Row
from userdp.files.remembered import SUMS, Least

FORMAT = 3

UNVERIFIED = (
    "who wrote this record is not verified: the run's key is not here, and anyone can write rows "
    "that fit together"
)
HALTED = (
    "the run halted at step {:,}: the users' gradients were not close enough to each other. All "
    "planned steps are charged, and the model is as it was before that one"
)

# How many steps there were, and the hash of the last row then.
Position = tuple[int, str]


@dataclass(kw_only=True)
class Kept:
    """The rows of a ledger without those of the steps, which are only counted.

    So a long run needs no more memory than a short one. `head` is the hash of the last row. Of the
    steps, all after `steps_begun` were charged as the rest of a run that ends early.
    """

    rows: list[Row] = field(default_factory=list)
    steps: int = 0
    steps_begun: int = 0
    head: str = ""

    def add(self, row: Row) -> None:
        """Take in the next row."""
        if row["kind"] == "step":
            self.steps += 1
            if "rest" not in row:
                self.steps_begun = self.steps
        else:
            self.rows.append(row)
        self.head = row["hash"]

    @property
    def is_halted(self) -> bool:
        """Whether a test ended the run before all planned steps were taken."""
        return any(row["kind"] == "halt" for row in self.rows)

    @property
    def continuations(self) -> list[tuple[int, str]]:
        """The numbers of steps from which a new process went on, each with the nonce of its noise.

        Copies of one ledger that go on, each by itself, must share no noise: the difference of what
        they release would show the data.
        """
        return [(row["first"], row["nonce"]) for row in self.rows if row["kind"] == "continued"]

    @property
    def is_closed(self) -> bool:
        """Whether the closing row is there."""
        return bool(self.rows) and self.rows[-1]["kind"] == "end"


def kept_rows(rows: Iterable[Row], path: Path, least: Least) -> Kept:
    """Read rows. Rows that make no sense are refused, even if they are chained correctly.

    A position that is remembered must be among them. The hash there stands for all rows before.
    """
    kept = Kept()
    is_there = least.position is None
    for row in rows:
        if not kept.rows:
            _check_first(row, path)
        else:
            _check_next(row, kept, path)
        kept.add(row)
        is_there = is_there or least.position == (kept.steps, kept.head)
    if not kept.rows and is_there:
        raise LedgerError(
            f"{path} has no row: the run was stopped before it began, and nothing was spent. "
            "Delete its directory and begin again."
        )
    if not is_there:
        raise LedgerError(
            f"{path}: rows were cut off or replaced since the checkpoint was written. What these "
            "rows say was spent is not what was spent. Restore the ledger."
        )
    if kept.steps < least.steps:
        raise LedgerError(
            f"{path}: {least.steps:,} steps were taken, by the sums in {path.parent / SUMS}, and "
            f"here are rows of {kept.steps:,}: rows were cut off, or an older ledger was put back. "
            "Restore the ledger."
        )
    return kept


def _check_first(row: Row, path: Path) -> None:
    if row.get("kind") != "run":
        raise LedgerError(f"{path}: the first row must describe the run.")
    if row.get("format") != FORMAT:
        raise LedgerError(f"{path}: written in a format this version does not read.")
    if type(row.get("fixed_seed")) is not bool or not isinstance(row.get("bound_to"), dict):
        raise LedgerError(f"{path}: the first row lacks what the run was bound to.")
    if not isinstance(row.get("model_check"), str):
        raise LedgerError(f"{path}: the first row does not say how the model was checked.")


def _check_next(row: Row, kept: Kept, path: Path) -> None:
    kind = row.get("kind")
    is_early = kind in ("paid", "earlier")
    is_known = is_early or kind in ("step", "halt", "doubt", "continued", "end")
    is_late = kept.is_halted and kind in ("step", "halt", "continued")
    if not is_known or kept.is_closed or (is_early and kept.steps) or is_late:
        raise LedgerError(
            f"{path}: after the run come the earlier runs and the paid rows, then the steps, then "
            "at most one that says that the run halted, then at most one closing row, and nothing "
            "else."
        )
    if kind == "doubt" and not isinstance(row.get("reason"), str):
        raise LedgerError(f"{path}: a row of doubt gives no reason.")
    if kind == "halt" and not (kept.steps and row.get("steps") == kept.steps):
        raise LedgerError(f"{path}: the run halted at another step than the last one.")
    if kind == "continued" and not _is_continuation(row, kept):
        raise LedgerError(f"{path}: the run went on at another step than the last one.")
    if kind == "step" and row.get("step") != kept.steps:
        raise LedgerError(f"{path}: the steps are not consecutive.")
    if kind == "step" and row.get("rest", True) is not True:
        raise LedgerError(f"{path}: a step is the rest of a run, or it is not: {row['rest']!r}.")
    if kind == "step" and "clip_norm" in row and not _is_planned(row, kept.rows[0]):
        raise LedgerError(f"{path}: a phase begins that the plan does not have.")
    if kind == "end" and row.get("steps") != kept.steps:
        raise LedgerError(f"{path}: the closing row counts other steps than there are.")


def _is_continuation(row: Row, kept: Kept) -> bool:
    # The last steps may have been charged and not taken: then they have other noise, too.
    first = row.get("first")
    is_step = isinstance(first, int) and 0 <= first <= kept.steps
    return is_step and row.get("steps") == kept.steps and isinstance(row.get("nonce"), str)


def _is_planned(row: Row, first: Row) -> bool:
    """Whether the plan has a phase of this clip norm that begins with this step."""
    found: Any = first
    for name in ("plan", "clip", "phases"):
        found = found.get(name) if isinstance(found, dict) else None
    return isinstance(found, list) and [row.get("step"), row["clip_norm"]] in found
