"""What ran: append-only, chained, on disk before any weight of the step is visible.

One JSON object a line. The first holds the plan and what it was bound to; then come the runs behind
the initial weights and the looks at the users' data that were paid for before training, then one
row for each step, and at the end of a finished run a closing row with the digests of what came out.
A record without a closing row is unfinished: nothing is promised from it. Nor is anything promised
from one with a row of doubt, which may stand among the steps: it says what was seen to be wrong.

Rows are chained (`chain.py`): every edited byte is found, a cut tail lacks the closing row, and
only who holds the run's key can write rows that pass as its own. Everything in a ledger is public:
no loss, no norm, no cohort ever enters it, and what it says of the data is keyed.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from userdp import chain
from userdp.accounting import events
from userdp.chain import Row
from userdp.chain import chained as _chained
from userdp.earlier import Earlier
from userdp.errors import InputError, LedgerError
from userdp.ledger_rows import FORMAT, check_content
from userdp.paid import Paid
from userdp.plan import Plan
from userdp.statement import Statement

__all__ = ["FORMAT", "Ledger", "_chained"]


UNVERIFIED = (
    "who wrote this record is not verified: the run's key is not here, and anyone can write rows "
    "that fit together"
)


class Ledger:
    """The record of one run, on disk or (without a path) in memory.

    Made by `create` (a new run), `open` (to go on with one) or `read` (to look: it cannot be
    charged).
    """

    def __init__(
        self, rows: list[Row], *, key: bytes | None, file: IO[str] | None, writable: bool
    ) -> None:
        self._rows = rows
        self._key = key
        self._file = file
        self._writable = writable
        # Held while a step is taken: two at a time would have the same number.
        self.turn = chain.Turn()
        # Read back, not made here: then only a closing row says that nothing is missing, also while
        # rows are added.
        self._from_disk = bool(rows)
        self._plan = _recorded_plan(rows[0]) if rows else None
        self._steps = sum(row["kind"] == "step" for row in rows)

    @staticmethod
    def create(
        plan: Plan,
        *,
        path: Path | None = None,
        bound_to: dict[str, str],
        fixed_seed: bool,
        model_check: str = "",
        data_cautions: Sequence[str] = (),
        key: bytes | None = None,
    ) -> Ledger:
        """A new ledger; refuses to overwrite one.

        `bound_to` names what the run depends on (data, initial weights, configuration, ...);
        `model_check` says how the model was shown to keep users apart; `data_cautions` are those of
        the store, and every statement repeats them. The `key` marks the rows as
        written by its holder; by default a new one, kept beside the ledger in `secret/`.
        """
        file = None
        if key is None:
            # Under a fixed seed everything repeats, this too. `train` gives one from the seed.
            fixed = hashlib.sha256(b"userdp fixed seed").digest()
            key = fixed if fixed_seed else chain.new_key()
        if path is not None:
            try:
                file = path.open("x", encoding="utf-8")
            except FileExistsError:
                raise LedgerError(
                    f"{path} already holds a run: choose another output directory."
                ) from None
            try:
                chain.lock(file, path)
                chain.write_key(path, key)
            except LedgerError:
                file.close()
                path.unlink()
                raise
        ledger = Ledger([], key=key, file=file, writable=True)
        ledger._plan = plan
        ledger._append(
            {
                "kind": "run",
                "format": FORMAT,
                "plan": plan.to_json(),
                # Redundant on purpose: an auditor can price this with dp_accounting alone.
                "event": None if plan.non_private else events.to_json(plan.event()),
                "bound_to": bound_to,
                "fixed_seed": fixed_seed,
                "model_check": model_check,
                "data_cautions": list(data_cautions),
                # No two runs share a first row, nor the noise that is bound to it.
                "nonce": "" if fixed_seed else secrets.token_hex(16),
            }
        )
        return ledger

    @staticmethod
    def read(path: Path) -> Ledger:
        """The ledger at `path`, to look at: charging it raises. Its chain is checked.

        With the run's key beside it, so is who wrote it.
        """
        key = chain.read_key(path)
        rows = chain.read_rows(path, key)
        check_content(rows, path)
        ledger = Ledger(rows, key=key, file=None, writable=False)
        ledger._check_events(path)
        return ledger

    @staticmethod
    def open(path: Path) -> Ledger:
        """The unfinished ledger at `path`, to go on with: rows are appended on disk.

        Needs the run's key; refuses a ledger that has its closing row, and one that is open
        elsewhere. Nothing is promised before `finish`: rows may have been cut off before.
        """
        # Says what is wrong with the file before one is made by opening it.
        Ledger.read(path)
        file = path.open("a", encoding="utf-8")
        try:
            chain.lock(file, path)
            # Only now can nobody else add a row: what was read before may be old.
            found = Ledger.read(path)
            if found._key is None:
                raise LedgerError(
                    f"{chain.key_path(path)} is not there: without the run's key no row can be "
                    "added."
                )
            if found.is_finished:
                raise LedgerError(f"{path} is closed: a finished run takes no further step.")
        except LedgerError:
            file.close()
            raise
        found._file = file
        found._writable = True
        return found

    def _check_events(self, path: Path) -> None:
        plan = self.plan
        try:
            plan.check_paid(self.paid, earlier=self.earlier)
        except InputError as error:
            raise LedgerError(f"{path}: {error}") from None
        if not plan.non_private and self._rows[0]["event"] != events.to_json(plan.event()):
            raise LedgerError(f"{path}: the recorded event is not the one of the recorded plan.")
        event = self._event()
        if self.end and self.end.get("event") != (None if event is None else events.to_json(event)):
            raise LedgerError(f"{path}: the closing row has another event than the steps recorded.")

    @property
    def plan(self) -> Plan:
        """The plan that ran."""
        assert self._plan is not None
        return self._plan

    @property
    def fixed_seed(self) -> bool:
        """Whether the noise can be repeated by whoever knows the seed."""
        return self._rows[0]["fixed_seed"]

    @property
    def bound_to(self) -> dict[str, str]:
        """What the run depends on, by name."""
        return dict(self._rows[0]["bound_to"])

    @property
    def model_check(self) -> str:
        """How the model was shown to keep users apart."""
        return self._rows[0]["model_check"]

    @property
    def steps(self) -> int:
        """How many steps were charged."""
        return self._steps

    @property
    def paid(self) -> tuple[Paid, ...]:
        """The looks at the users' data that were charged before the first step."""
        return tuple(Paid.from_json(row) for row in self._before_steps("paid"))

    @property
    def earlier(self) -> tuple[Earlier, ...]:
        """The runs behind the weights that this one started from."""
        return tuple(Earlier.from_json(row) for row in self._before_steps("earlier"))

    def _before_steps(self, kind: str) -> list[Row]:
        found: list[Row] = []
        for row in self._rows[1:]:
            if row["kind"] in ("step", "end"):
                break
            if row["kind"] == kind:
                found.append(row)
        return found

    @property
    def run_digest(self) -> str:
        """The hash of the first row: names the plan and what the run was bound to."""
        return self._rows[0]["hash"]

    @property
    def end(self) -> dict[str, Any] | None:
        """The closing row; None while there is none."""
        return self._rows[-1] if self._rows[-1]["kind"] == "end" else None

    @property
    def is_finished(self) -> bool:
        """Whether the closing row is there."""
        return self.end is not None

    @property
    def is_verified(self) -> bool:
        """Whether the rows were checked with the key of the run, or written here."""
        return self._key is not None

    def check_open(self) -> None:
        """Refuse to go on with a ledger that cannot be charged."""
        if not self._writable or self._key is None:
            raise LedgerError(
                "this ledger was read back or closed: what it is charged would not be on disk. "
                "Use Ledger.open to go on with a run."
            )

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
        self._check_unbegun("pay for a look at the data before the first")
        item = Paid(what=what, event=event)
        self.plan.check_paid([*self.paid, item], earlier=self.earlier)
        self._append({"kind": "paid", **item.to_json()})

    def inherit(self, before: Sequence[Earlier]) -> None:
        """Record the runs behind the initial weights: their cost is composed with this run's.

        Allowed before the first step only. What cannot be priced together is refused.
        """
        if not before:
            return
        self._check_unbegun("the runs behind the initial weights are recorded before the first")
        self.plan.check_paid(self.paid, earlier=[*self.earlier, *before])
        for item in before:
            self._append({"kind": "earlier", **item.to_json()})

    def charge_step(self) -> None:
        """Record the next step; returns once it is on disk."""
        self._append({"kind": "step", "step": self._steps})
        self._steps += 1

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why nothing is promised from this record, if that was seen while it ran."""
        return tuple(row["reason"] for row in self._rows if row["kind"] == "doubt")

    def doubt(self, reason: str) -> None:
        """Record that the guarantee does not hold, and why; returns once it is on disk.

        >>> plan = Plan.sample_users(num_users=100, expected_cohort_size=10, group_size=2, steps=5,
        ...                          clip_norm=1.0, noise_multiplier=2.0, delta=1e-3)
        >>> ledger = Ledger.create(plan, bound_to={}, fixed_seed=False)
        >>> ledger.charge_step()
        >>> ledger.doubt("the paths were seen to differ after 1 released steps")
        >>> ledger.statement().guarantee
        False
        """
        self._append({"kind": "doubt", "reason": reason})

    def finish(self, digests: dict[str, str], *, model_files: dict[str, str] | None = None) -> None:
        """Write the closing row and close: no row can follow it.

        `digests` name what came out; `model_files` the files of the saved model, by content.
        """
        event = self._event()
        self._append(
            {
                "kind": "end",
                "steps": self._steps,
                "event": None if event is None else events.to_json(event),
                "digests": self.bound_to | digests,
                "model_files": model_files or {},
            }
        )
        self.close()

    def as_entry(self) -> dict[str, Any] | None:
        """This run as the next one on the same weights will see it; None if nothing was spent."""
        if not self._steps and not self.paid:
            return None
        return Earlier(
            run=self.run_digest,
            data=self._rows[0]["bound_to"].get("data", ""),
            plan=self.plan.to_json(),
            event=self._event(),
            steps=self._steps,
            adjacency=self.plan.adjacency,
            fixed_seed=self.fixed_seed,
            paid=self.paid,
            doubts=self.doubts,
        ).to_json()

    def _event(self) -> events.DpEvent | None:
        """What the steps taken cost; None without a step, or without privacy."""
        return self.plan.event(self._steps) if self._steps and not self.plan.non_private else None

    def statement(self, *, unfinished: bool = False) -> Statement:
        """What may be said about the model after what is recorded here, paid items included.

        `unfinished` if anything else than a missing closing row shows it not to be whole.
        """
        return self.plan.statement(
            steps=self._steps,
            fixed_seed=self.fixed_seed,
            paid=self.paid,
            earlier=self.earlier,
            unfinished=unfinished or (self._from_disk and not self.is_finished),
            model_check=self.model_check,
            doubts=self.doubts,
            more_cautions=(
                *self._rows[0].get("data_cautions", ()),
                *(() if self.is_verified else (UNVERIFIED,)),
            ),
        )

    def close(self) -> None:
        """Close the ledger; the rows stay readable, and it can no longer be charged."""
        self._writable = False
        if self._file is not None:
            self._file.close()
            self._file = None

    def _check_unbegun(self, rule: str) -> None:
        if self._steps:
            raise LedgerError(f"{self._steps:,} steps are recorded: {rule}.")

    def _append(self, row: Row) -> None:
        self.check_open()
        assert self._key is not None
        before = self._rows[-1]["hash"] if self._rows else ""
        row = chain.sealed(before, row, self._key)
        if self._file is not None:
            self._file.write(chain.canonical(row) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        self._rows.append(row)


def _recorded_plan(row: Row) -> Plan:
    try:
        return Plan.from_json(row["plan"])
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError):
        raise LedgerError("the ledger's first row holds no plan this version can read.") from None
