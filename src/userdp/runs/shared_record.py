"""One record for all ranks of a run: the first rank writes it, and the others have a copy.

The others get the ledger's rows, its key and the run's secret from the first rank, over the network
between the ranks (`ranks.group`). They keep it in memory. From then on every rank draws the same
cohorts and the same noise, and charges the same rows; only those of the first are on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from userdp.errors import InputError
from userdp.index import UserIndex
from userdp.ledger.book import Ledger
from userdp.ledger.copied import LedgerCopy, Rows
from userdp.ledger.lineage import begin_run
from userdp.plan import Plan
from userdp.ranks import Ranks
from userdp.runs.continuation import Continuation
from userdp.runs.record import OnStep, RunRecord
from userdp.runs.repeated_sums import FollowedSums, NoSums
from userdp.streams import RunSecret


@dataclass(frozen=True, kw_only=True)
class _Told:
    """What the first rank tells of its record. Secret."""

    rows: Rows
    secret: RunSecret
    position: int
    charged_before: int
    keeps_sums: bool
    continuation: Continuation

    @staticmethod
    def by(record: RunRecord) -> _Told:
        return _Told(
            rows=LedgerCopy.rows_of(record.ledger),
            secret=record._secret,
            position=record._position,
            charged_before=record._charged_before,
            keeps_sums=not isinstance(record.sums, NoSums),
            continuation=replace(record._continuation),
        )


class FollowingRecord(RunRecord):
    """The record of a run on a rank that writes nothing."""

    @staticmethod
    def of(told: _Told, on_step: OnStep | None = None) -> FollowingRecord:
        """A copy of the first rank's record, as it is now."""
        record = FollowingRecord(LedgerCopy.of(told.rows), told.secret, on_step=on_step)
        record._follow(told)
        return record

    def _follow(self, told: _Told) -> None:
        self.ledger = LedgerCopy.of(told.rows)
        self._secret = told.secret
        self._position, self._charged_before = told.position, told.charged_before
        self._continuation = replace(told.continuation)
        self.sums = FollowedSums(told.secret.key, self.ranks.rank) if told.keeps_sums else NoSums()


def shared(ranks: Ranks, make: Callable[[], RunRecord], on_step: OnStep | None = None) -> RunRecord:
    """The record that `make` gives on the first rank, and copies of it on the others."""
    made: list[RunRecord] = []

    def tell() -> _Told:
        made.append(make())
        return _Told.by(made[0])

    if ranks.count == 1:
        return make()
    told = ranks.by_first(tell)
    record = made[0] if made else FollowingRecord.of(told, on_step)
    record.ranks = ranks
    return record


def begin_together(
    record: RunRecord,
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    index: UserIndex,
) -> None:
    """Begin the run on all ranks, with what is composed and bound on the first (`begin`)."""

    def begin() -> _Told | None:
        record.begin(plan, model, optimizer, index)
        return None if record.ranks.count == 1 else _Told.by(record)

    told = record.ranks.by_first(begin)
    if isinstance(record, FollowingRecord) and told is not None:
        record._follow(told)
        begin_run(model, record.ledger)


def finish_together(
    record: RunRecord,
    model: nn.Module,
    tokenizer: Any = None,
    *,
    people: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Write the closing row and the model, on the first rank; the others get the row."""

    def finish() -> Rows | None:
        record.finish(model, tokenizer, people=people())
        return None if record.ranks.count == 1 else LedgerCopy.rows_of(record.ledger)

    rows = record.ranks.by_first(finish)
    if isinstance(record, FollowingRecord) and rows is not None:
        record.ledger = LedgerCopy.of(rows)


def ledger_of_first(record: RunRecord) -> Ledger:
    """The ledger as the first rank has it now; the others have a copy."""
    if record.ranks.count == 1:
        return record.ledger
    rows = record.ranks.by_first(lambda: LedgerCopy.rows_of(record.ledger))
    return record.ledger if record.ranks.is_first else LedgerCopy.of(rows)


def check_owner(record: RunRecord, ranks: Ranks) -> None:
    """Refuse a record that every rank has made for itself: each has its own secret."""
    if record.ranks.count != ranks.count:
        raise InputError(
            f"{ranks.count} ranks take each step together, and this record is that of "
            f"{record.ranks.count}: leave `record` out, or make one for all of them, "
            "shared(Ranks.found(), lambda: RunRecord.create(...))."
        )
