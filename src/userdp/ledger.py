"""What ran: append-only, hash-chained, on disk before any weight of the step is visible.

One JSON object a line. The first holds the plan and what it was bound to; then come the looks at
the users' data that were paid for before training, then one row for each step. A row's hash covers
its content and the hash before it, so an edited or reordered row, or one removed from the middle,
is found; rows cut off at the end are not. Everything in a ledger is public: no loss, no norm, no
cohort ever enters it.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import IO, Any

from userdp.accounting import events
from userdp.errors import InputError, LedgerError
from userdp.paid import Paid
from userdp.plan import Plan
from userdp.statement import Statement

FORMAT = 1


class Ledger:
    """The record of one run, on disk or (without a path) in memory."""

    def __init__(self, rows: list[dict[str, Any]], file: IO[str] | None) -> None:
        self._rows = rows
        self._file = file

    @staticmethod
    def create(
        plan: Plan, *, path: Path | None = None, bound_to: dict[str, str], fixed_seed: bool
    ) -> Ledger:
        """A new ledger; refuses to overwrite one.

        `bound_to` names what the run depends on (data fingerprint, configuration, model).
        """
        file = None
        if path is not None:
            try:
                file = path.open("x", encoding="utf-8")
            except FileExistsError:
                raise LedgerError(
                    f"{path} already holds a run: choose another output directory."
                ) from None
        ledger = Ledger([], file)
        ledger._append(
            {
                "kind": "run",
                "format": FORMAT,
                "plan": plan.to_json(),
                # Redundant on purpose: an auditor can price this with dp_accounting alone.
                "step_event": None if plan.non_private else events.to_json(plan.step_event()),
                "bound_to": bound_to,
                "fixed_seed": fixed_seed,
            }
        )
        return ledger

    @staticmethod
    def read(path: Path) -> Ledger:
        """The ledger at `path`, its chain checked."""
        if not path.is_file():
            raise LedgerError(f"{path} is not there: is this the directory of a run?")
        rows: list[dict[str, Any]] = []
        before = ""
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                row: dict[str, Any] = json.loads(line)
                claimed = row.pop("hash")
            except (ValueError, KeyError, AttributeError, TypeError):
                raise LedgerError(f"{path}, line {number}: not a ledger row.") from None
            if claimed != _chained(before, row):
                raise LedgerError(
                    f"{path}, line {number}: the hash chain breaks here; a row was edited or "
                    "removed."
                )
            before = row["hash"] = claimed
            rows.append(row)
        ledger = Ledger(rows, None)
        ledger._check_content(path)
        return ledger

    def _check_content(self, path: Path) -> None:
        if not self._rows or self._rows[0].get("kind") != "run":
            raise LedgerError(f"{path}: the first row must describe the run.")
        if self._rows[0].get("format") != FORMAT:
            raise LedgerError(f"{path}: written in a format this version does not read.")
        kinds = [row.get("kind") for row in self._rows[1:]]
        num_paid = kinds.count("paid")
        if kinds != ["paid"] * num_paid + ["step"] * (len(kinds) - num_paid):
            raise LedgerError(
                f"{path}: after the run come the paid rows and then the steps, and nothing else."
            )
        steps = [row.get("step") for row in self._rows[1 + num_paid :]]
        if steps != list(range(len(steps))):
            raise LedgerError(f"{path}: the steps are not consecutive.")
        plan = self.plan
        try:
            plan.check_paid(self.paid)
        except InputError as error:
            raise LedgerError(f"{path}: {error}") from None
        if not plan.non_private and self._rows[0]["step_event"] != events.to_json(
            plan.step_event()
        ):
            raise LedgerError(f"{path}: the recorded event is not the one of the recorded plan.")

    @property
    def plan(self) -> Plan:
        """The plan that ran."""
        return Plan.from_json(self._rows[0]["plan"])

    @property
    def fixed_seed(self) -> bool:
        """Whether the noise can be repeated by whoever knows the seed."""
        return self._rows[0]["fixed_seed"]

    @property
    def steps(self) -> int:
        """How many steps were charged."""
        return sum(row["kind"] == "step" for row in self._rows)

    @property
    def paid(self) -> tuple[Paid, ...]:
        """The looks at the users' data that were charged before the first step."""
        return tuple(Paid.from_json(row) for row in self._rows if row["kind"] == "paid")

    @property
    def run_digest(self) -> str:
        """The hash of the first row: names the plan and what the run was bound to."""
        return self._rows[0]["hash"]

    def charge(self, event: events.DpEvent, *, what: str) -> None:
        """Record a look at the users' data beside the steps; returns once it is on disk.

        `what` was learnt, in a short public phrase; `event` prices it. Allowed before the first
        step only: what is learnt later would have to be paid before it is used.

        >>> from dp_accounting.dp_event import GaussianDpEvent
        >>> plan = Plan.sample_users(num_users=100, expected_cohort_size=10, group_size=2, steps=5,
        ...                          clip_norm=1.0, noise_multiplier=2.0, delta=1e-3)
        >>> ledger = Ledger.create(plan, bound_to={}, fixed_seed=False)
        >>> ledger.charge(GaussianDpEvent(8.0), what="group size")
        >>> ledger.steps, ledger.statement().paid
        (0, ('group size: alone epsilon=0.259, included in the total',))
        """
        if self.steps:
            raise LedgerError(
                f"{self.steps:,} steps are recorded: pay for a look at the data before the first."
            )
        item = Paid(what=what, event=event)
        self.plan.check_paid([*self.paid, item])
        self._append({"kind": "paid", **item.to_json()})

    def charge_step(self) -> None:
        """Record the next step; returns once it is on disk."""
        self._append({"kind": "step", "step": self.steps})

    def statement(self) -> Statement:
        """What may be said about the model after what is recorded here, paid items included."""
        return self.plan.statement(steps=self.steps, fixed_seed=self.fixed_seed, paid=self.paid)

    def close(self) -> None:
        """Close the file; the rows stay readable."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, row: dict[str, Any]) -> None:
        before = self._rows[-1]["hash"] if self._rows else ""
        row["hash"] = _chained(before, row)
        if self._file is not None:
            self._file.write(json.dumps(row, sort_keys=True) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        self._rows.append(row)


def _chained(before: str, row: dict[str, Any]) -> str:
    return hashlib.sha256((before + json.dumps(row, sort_keys=True)).encode()).hexdigest()
