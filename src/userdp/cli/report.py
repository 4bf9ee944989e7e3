"""`userdp report`: statement, model card and page of a run."""

from __future__ import annotations

from userdp.cli import common
from userdp.report import write


def report(
    run: common.Run,
    unfinished: common.Unfinished = False,
    json: common.Json = False,
) -> None:
    """Write report.html, MODEL_CARD.md and statement.json from a run's ledger."""
    files = write.write_report(run, unfinished=unfinished)
    common.emit(
        json,
        {"html": str(files.html), "card": str(files.card), "statement": str(files.statement)},
        f"{files.html}\n{files.card}\n{files.statement}",
    )
