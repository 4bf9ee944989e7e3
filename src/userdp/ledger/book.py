"""The record of a run: append-only, chained, and on disk before a step's weights are visible.

Every line is one JSON object:

1. the run: the plan and what it was bound to;
2. the runs behind the initial weights, and the looks at the users' data that were paid for before
   training;
3. one row for each step, and one if a step failed a test that ended the run;
4. in a finished run, a closing row with the digests of what came out.

A record without a closing row is unfinished, and nothing is promised from it. A row of doubt may
stand among the steps. It says what was seen to be wrong, and then nothing is promised either.

Rows are chained (`files/chain.py`). Every edited byte is found. A ledger whose end was cut off
lacks the closing row. Only the holder of the run's key can write rows that pass as the run's own.
Everything in a ledger is public: it never contains a loss, a norm or a cohort, and what it says
about the data is keyed.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from userdp.accounting import events
from userdp.errors import LedgerError
from userdp.files import chain
from userdp.files.chain import Row
from userdp.files.remembered import Least, least_of
from userdp.files.rows import RowsFile
from userdp.ledger.checks import check_events
from userdp.ledger.rows import FORMAT, HALTED, UNVERIFIED, Kept, Position, kept_rows
from userdp.plan import Plan
from userdp.prices.earlier import Earlier, chose_rows
from userdp.prices.paid import Paid
from userdp.statement import Statement


class Ledger:
    """The record of one run: on disk, or in memory if there is no path.

    `create` makes one for a new run, `open` continues one, and `read` shows one. A ledger from
    `read` cannot be charged.
    """

    def __init__(self, kept: Kept, *, key: bytes | None, writable: bool) -> None:
        self._kept = kept
        self._key = key
        # Where rows are appended on disk; None for a ledger in memory.
        self._file: RowsFile | None = None
        self._writable = writable
        # Held while a step is taken: two at a time would have the same number.
        self.turn = chain.Turn()
        # Of rows that were read back, only a closing row shows that none is missing.
        self._from_disk = bool(kept.rows)
        self._plan = Plan.from_json(kept.rows[0].get("plan", {})) if kept.rows else None

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

        `bound_to` names what the run depends on (data, initial weights, configuration, ...).
        `model_check` says how the model was shown to keep users apart. `data_cautions` are those of
        the store, and every statement repeats them. The `key` marks the rows as written by its
        holder. By default a new key is made and kept beside the ledger in `secret/`.
        """
        if key is None:
            # With a fixed seed the key repeats, too. `train` derives one from the seed.
            fixed = hashlib.sha256(b"userdp fixed seed").digest()
            key = fixed if fixed_seed else chain.new_key()
        ledger = Ledger(Kept(), key=key, writable=True)
        if path is not None:
            ledger._file = RowsFile.create(path, key)
        ledger._plan = plan
        ledger._append(
            {
                "kind": "run",
                "format": FORMAT,
                "plan": plan.to_json(),
                # Redundant on purpose: an auditor can price this with dp_accounting alone.
                "event": events.to_json(plan.event()) if plan.has_price else None,
                "bound_to": bound_to,
                "fixed_seed": fixed_seed,
                "model_check": model_check,
                "data_cautions": list(data_cautions),
                # So every run has its own first row, to which its noise is bound.
                "nonce": "" if fixed_seed else secrets.token_hex(16),
            }
        )
        return ledger

    @staticmethod
    def read(
        path: Path, *, remembered: Position | None = None, without_torn_row: bool = False
    ) -> Ledger:
        """The ledger at `path`, only to look at: charging it raises.

        Its chain is checked. If the run's key lies beside it, who wrote it is checked, too. A
        `remembered` position must be among its rows; if none is given, that of the
        newest checkpoint. A last row that is cut short is refused, unless it is to be left out.
        """
        least = least_of(path, remembered)
        content = chain.read_content(path)
        if without_torn_row:
            content = chain.without_torn_row(content)
        return Ledger._of_content(content, path, least)

    @staticmethod
    def _of_content(content: bytes, path: Path, least: Least) -> Ledger:
        key = chain.read_key(path)
        kept = kept_rows(chain.rows_of(content, path, key), path, least)
        ledger = Ledger(kept, key=key, writable=False)
        check_events(ledger, path)
        return ledger

    @staticmethod
    def open(path: Path, *, remembered: Position | None = None) -> Ledger:
        """The unfinished ledger at `path`, to continue: rows are appended on disk.

        Needs the run's key. Refuses a ledger that has its closing row or is open elsewhere. Nothing
        is promised before `finish`, because rows may have been cut off earlier. A checkpoint that
        remembers a position shows that none were cut off before it, so give it as `remembered`.

        The part of a row that a stopped program left is cut off: nobody saw what it is about.
        """
        # Only under the lock can nobody else add a row.
        file = RowsFile.open(path)
        try:
            least = least_of(path, remembered)
            content = chain.read_content(path)
            right = chain.without_torn_row(content)
            found = Ledger._of_content(right, path, least)
            if found._key is None:
                raise LedgerError(
                    f"{chain.key_path(path)} is not there: without the run's key no row can be "
                    "added."
                )
            if found.is_finished:
                raise LedgerError(f"{path} is closed: a finished run takes no further step.")
            file.put_right(content, right)
        except BaseException:
            file.close()
            raise
        found._file = file
        found._writable = True
        return found

    @property
    def first(self) -> Row:
        """The row that describes the run."""
        return self._kept.rows[0]

    @property
    def plan(self) -> Plan:
        """The plan that ran."""
        assert self._plan is not None
        return self._plan

    @property
    def fixed_seed(self) -> bool:
        """Whether anyone who knows the seed can repeat the noise."""
        return self.first["fixed_seed"]

    @property
    def bound_to(self) -> dict[str, str]:
        """What the run depends on, by name."""
        return dict(self.first["bound_to"])

    @property
    def model_check(self) -> str:
        """How the model was shown to keep users apart."""
        return self.first["model_check"]

    @property
    def steps(self) -> int:
        """How many steps were charged."""
        return self._kept.steps

    @property
    def steps_begun(self) -> int:
        """How many steps were charged to be taken. What follows is the rest of a run that ended."""
        return self._kept.steps_begun

    @property
    def paid(self) -> tuple[Paid, ...]:
        """The looks at the users' data that were charged before the first step."""
        return tuple(Paid.from_json(row) for row in self._rows_of("paid"))

    @property
    def earlier(self) -> tuple[Earlier, ...]:
        """The runs behind the weights that this one started from."""
        return tuple(Earlier.from_json(row) for row in self._rows_of("earlier"))

    def _rows_of(self, kind: str) -> list[Row]:
        return [row for row in self._kept.rows if row["kind"] == kind]

    @property
    def head(self) -> str:
        """The hash of the last row. It stands for all rows."""
        return self._kept.head

    @property
    def run_digest(self) -> str:
        """The hash of the first row. It names the plan and what the run was bound to."""
        return self.first["hash"]

    @property
    def end(self) -> dict[str, Any] | None:
        """The closing row; None while there is none."""
        return self._kept.rows[-1] if self._kept.is_closed else None

    @property
    def is_finished(self) -> bool:
        """Whether the closing row is there."""
        return self.end is not None

    @property
    def is_verified(self) -> bool:
        """Whether the rows were checked with the run's key, or written here."""
        return self._key is not None

    def check_open(self) -> None:
        """Raise if this ledger cannot be charged."""
        if not self._writable or self._key is None:
            raise LedgerError(
                "this ledger was read back or closed: what it is charged would not be on disk. "
                "Use Ledger.open to go on with a run."
            )

    def charge(self, event: events.DpEvent, *, what: str) -> None:
        """Record a look at the users' data beside the steps; returns once it is on disk.

        `what` is a short public phrase that says what was learnt; `event` prices it. Allowed before
        the first step only: what is learnt must be paid for before it is used.

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

        Allowed before the first step only. Runs that cannot be priced together are refused.
        """
        if not before:
            return
        self._check_unbegun("the runs behind the initial weights are recorded before the first")
        self.plan.check_paid(self.paid, earlier=[*self.earlier, *before])
        for item in before:
            self._append({"kind": "earlier", **item.to_json()})

    def charge_step(self, *, of_rest: bool = False) -> None:
        """Record the next step, or one of the rest that a run which ends early does not take."""
        more = self.plan.clip.begun_at(self.steps) | ({"rest": True} if of_rest else {})
        self._append({"kind": "step", "step": self.steps, **more})

    def go_on(self, first: int, nonce: str) -> None:
        """Record that a new process goes on, with noise of its own from step `first` on."""
        self._append({"kind": "continued", "steps": self.steps, "first": first, "nonce": nonce})

    @property
    def continuations(self) -> list[tuple[int, str]]:
        """The numbers of steps from which a new process went on, each with its nonce."""
        return self._kept.continuations

    def halt(self) -> None:
        """Record that the last step, which changed no weight, failed its test: the run ends."""
        self._append({"kind": "halt", "steps": self.steps})

    @property
    def is_halted(self) -> bool:
        """Whether a test ended the run early."""
        return self._kept.is_halted

    @property
    def doubts(self) -> tuple[str, ...]:
        """The reasons, seen while the run went on, why nothing is promised from this record."""
        return tuple(row["reason"] for row in self._rows_of("doubt"))

    def doubt(self, reason: str) -> None:
        """Record why the guarantee does not hold from here on; returns once it is on disk."""
        self._append({"kind": "doubt", "reason": reason})

    def finish(
        self,
        digests: dict[str, str],
        *,
        model_files: dict[str, str] | None = None,
        people: dict[str, Any] | None = None,
    ) -> None:
        """Write the closing row and close the ledger: no row can follow it.

        `digests` name what came out. `model_files` gives the digest of every file of the saved
        model. `people` says what else was released about the same people (`budget/debits.py`).
        """
        event = self.event()
        self._append(
            {
                "kind": "end",
                "steps": self.steps,
                "event": None if event is None else events.to_json(event),
                "digests": self.bound_to | digests,
                "model_files": model_files or {},
                "people": people or {},
            }
        )
        self.close()

    def as_entry(self) -> dict[str, Any] | None:
        """This run as a later run on the same weights will see it; None if nothing was spent."""
        if not self.steps and not self.paid:
            return None
        return Earlier(
            run=self.run_digest,
            data=self.first["bound_to"].get("data", ""),
            plan=self.plan.to_json(),
            event=self.event(),
            steps=self.priced_steps,
            adjacency=self.plan.adjacency,
            fixed_seed=self.fixed_seed,
            paid=self.paid,
            doubts=self.doubts,
            chose_rows=chose_rows(self.bound_to),
        ).to_json()

    def event(self) -> events.DpEvent | None:
        """The cost of the run; None without a step, or without privacy."""
        return self.plan.event(self.priced_steps) if self.steps and self.plan.has_price else None

    @property
    def priced_steps(self) -> int:
        """All planned steps, once there is one: who ends a run may look first (`early_end.py`)."""
        return max(self.plan.steps, self.steps) if self.steps else 0

    def statement(self, *, unfinished: bool = False) -> Statement:
        """What may be said after everything recorded here; `unfinished` if more shows a gap."""
        people = (self.end or {}).get("people", {})
        return self.plan.statement(
            steps=self.priced_steps,
            fixed_seed=self.fixed_seed,
            paid=self.paid,
            earlier=self.earlier,
            unfinished=unfinished or (self._from_disk and not self.is_finished),
            model_check=self.model_check,
            doubts=self.doubts,
            others=people.get("others", ()),
            epsilon_of_all=people.get("epsilon"),
            more_cautions=(
                *(HALTED.format(self.steps),) * self.is_halted,
                *self.first.get("data_cautions", ()),
                *people.get("cautions", ()),
                *(() if self.is_verified else (UNVERIFIED,)),
            ),
        )

    def close(self) -> None:
        """Close the ledger. Its rows stay readable, but it can no longer be charged."""
        self._writable = False
        if self._file is not None:
            self._file.close()
            self._file = None

    def _check_unbegun(self, rule: str) -> None:
        if self.steps:
            raise LedgerError(f"{self.steps:,} steps are recorded: {rule}.")

    def _append(self, row: Row) -> None:
        self.check_open()
        assert self._key is not None
        row = chain.sealed(self._kept.head, row, self._key)
        if self._file is not None:
            try:
                self._file.append(chain.canonical(row).encode() + b"\n")
            except BaseException:
                # What is on the disk is not known now. `open` finds it out.
                self._writable = False
                raise
        self._kept.add(row)
