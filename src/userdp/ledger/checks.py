"""What a ledger's rows say about the cost must be what its plan and its steps cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from userdp.accounting import events
from userdp.errors import InputError, LedgerError

if TYPE_CHECKING:
    from userdp.accounting.events import DpEvent
    from userdp.ledger.book import Ledger


def check_events(ledger: Ledger, path: Path) -> None:
    """Refuse a record whose events are not those of its plan, its steps and its end."""
    plan = ledger.plan
    try:
        plan.check_paid(ledger.paid, earlier=ledger.earlier)
    except InputError as error:
        raise LedgerError(f"{path}: {error}") from None
    if ledger.first["event"] != _written(plan.event() if plan.has_price else None):
        raise LedgerError(f"{path}: the recorded event is not the one of the recorded plan.")
    if ledger.is_halted and plan.halting_test is None:
        raise LedgerError(f"{path}: the run halted, and its plan has no test to halt it.")
    if ledger.end and ledger.end.get("event") != _written(ledger.event()):
        raise LedgerError(f"{path}: the closing row has another event than the steps recorded.")


def _written(event: DpEvent | None) -> dict[str, object] | None:
    return None if event is None else events.to_json(event)
