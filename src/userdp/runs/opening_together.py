"""One run is opened by all ranks: the first reads and writes its files, and the others follow.

The others get the record, what the run begins with and the checkpoint that it goes on from over the
network between the ranks. They read the store themselves. What a run is bound to is computed on
every rank and compared, so that no rank trains on other data, another model or other settings.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from userdp.ledger.copied import LedgerCopy, Rows
from userdp.models.checks import trainable_parameters
from userdp.runs.continuing import Beginning
from userdp.runs.opening import Given, Opened, open_run, rows_and_names
from userdp.runs.record import RunRecord
from userdp.runs.same import MEANINGS
from userdp.runs.shared_moment import shared_moment
from userdp.runs.shared_record import shared
from userdp.runs.state import carry_finished, restore_beginning

# Ranks may run on different chips; the ledger names the first rank's.
UNCOMPARED = ("hardware",)


@dataclass(frozen=True, kw_only=True)
class _Outline:
    """What the others must know of a run that the first rank has opened."""

    before: int
    goes_on: bool
    finished: Rows | None


def open_together(given: Given) -> Opened:
    """The run on this rank. Whatever the first rank refuses, all refuse."""
    ranks = given.ranks
    if ranks.count == 1:
        return open_run(given)
    opened = ranks.on_first(lambda: open_run(given))

    def outline() -> _Outline:
        assert opened is not None
        finished = opened.finished
        return _Outline(
            before=opened.beginning.before,
            goes_on=opened.goes_on,
            finished=None if finished is None else LedgerCopy.rows_of(finished),
        )

    told = ranks.by_first(outline)
    if told.finished is not None:
        ranks.copy_from_first_(trainable_parameters(given.model).values())
        if opened is not None:
            return opened
        ledger = LedgerCopy.of(told.finished)
        carry_finished(given.model, ledger, ())
        return Opened(beginning=Beginning(), finished=ledger)
    record = shared(ranks, lambda: _record_of(opened), given.on_step)
    return opened or Opened(
        beginning=Beginning(before=told.before), goes_on=told.goes_on, record=record
    )


def _record_of(opened: Opened | None) -> RunRecord:
    assert opened is not None
    assert opened.record is not None
    return opened.record


def made_alike(given: Given, opened: Opened) -> Opened:
    """The run on this rank with the rows it trains on; refused if the ranks are not alike."""
    ranks = given.ranks
    if ranks.count == 1:
        return opened
    began = shared_moment(ranks, opened.beginning.moment)
    moment = shared_moment(ranks, opened.moment)
    with ranks.together():
        if not ranks.is_first:
            beginning = Beginning(before=opened.beginning.before, moment=began)
            restore_beginning(
                beginning, given.model, given.optimizer, given.scheduler, given.average
            )
            given.store.verify()
            assert opened.record is not None
            row_choice, bound_to = rows_and_names(given, opened.record.ledger.plan)
            opened = dataclasses.replace(
                opened,
                beginning=beginning,
                moment=moment,
                row_choice=row_choice,
                bound_to=bound_to,
            )
    # The first rank's weights, and those of a model that has adapters, are handed out later.
    ranks.check_same(
        {
            MEANINGS.get(name, name): value
            for name, value in opened.bound_to.items()
            if name not in UNCOMPARED
        }
    )
    return opened
