"""`userdp finalize`: destroys a run's noise secret."""

from __future__ import annotations

from typing import Annotated

import typer

from userdp.budget.debits import settle_given_up
from userdp.cli import common
from userdp.runs import finalize as ending


def finalize(
    run: common.Run,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Give up the rest of a run that is not finished.")
    ] = False,
    json: common.Json = False,
) -> None:
    """Destroy a run's noise secret and its checkpoints. It cannot be resumed afterwards."""
    done = ending.finalize(run, unfinished=unfinished)
    if done.rows_are_missing:
        common.say(
            "note: the run holds more steps than its ledger: rows were cut off, so the budget of "
            "its people counts every planned step"
        )
    elif not done.is_finished and not settle_given_up(run):
        common.say(
            "note: the budget of its people was not found; where it counts this run, it counts "
            "every planned step"
        )
    told = "\n".join(f"destroyed {name}" for name in done.files) or "nothing was left to destroy"
    common.emit(
        json,
        {"files": list(done.files), **common.promised(done.statement)},
        f"{told}\n{done.statement.sentence}",
    )
