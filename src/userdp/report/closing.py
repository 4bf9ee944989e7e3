"""The words that a run leaves with its weights: while it goes on, and when it has ended."""

from __future__ import annotations

from userdp.files.durable import write_file
from userdp.plan import Plan
from userdp.plans.words import mark_in_words
from userdp.report.card import card_of_run
from userdp.runs.files import RecordedRun, statement_file

UNFINISHED = """---
tags:
- no-privacy-guarantee
---

# Model card

{mark}No privacy guarantee is stated here: these weights were written before their run had ended.

Once it has, what is guaranteed for everything that it released is in `statement.json`, in the
folder above this one. Publish what `userdp export` writes, and not this folder.
"""


def unfinished_card(plan: Plan) -> str:
    """The card of weights that are written while their run goes on: it promises nothing."""
    mark = mark_in_words(plan)
    return UNFINISHED.format(mark=f"{mark}. " if mark else "")


def write_words(record: RecordedRun) -> None:
    """Write the card of the run's model, if it has one, and the statement of its closed ledger.

    The statement comes last. Where there is one, the card describes the finished run.
    """
    run, statement = record.run, record.statement()
    if (run / "model").is_dir():
        write_file(run / "model" / "README.md", card_of_run(record, statement).encode())
    write_file(run / "statement.json", statement_file(statement))
