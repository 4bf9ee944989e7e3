"""`userdp ledger verify`: is the record of a run whole, closed and of these weights?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from userdp.cli import common
from userdp.runs.check import RunCheck, check_place

app = typer.Typer(help="Check the records of runs.", no_args_is_help=True)


@app.callback()
def ledger() -> None:
    """Check the records of runs."""


@app.command("verify")
def verify(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Directories of runs, of exports, or a trainer's output_dir."),
    ],
    json: common.Json = False,
) -> None:
    """Check that records are whole, closed and of these weights."""
    found = [check_place(place) for place in runs]
    common.emit(json, _payload(found), "\n".join(_lines(found)))
    if not all(check.ok for check in found):
        # The result says what is wrong, so there is no further message.
        raise typer.Exit(2)


def _payload(found: list[RunCheck]) -> dict[str, Any]:
    """The answer over all runs, and the answer for each."""
    several = len(found) > 1

    def named(check: RunCheck, texts: tuple[str, ...]) -> list[str]:
        return [f"{check.run}: {text}" if several else text for text in texts]

    return {
        "ok": all(check.ok for check in found),
        "steps": sum(check.steps or 0 for check in found),
        "earlier_steps": sum(check.earlier_steps for check in found),
        "closed": all(check.closed for check in found),
        "problems": [text for check in found for text in named(check, check.problems)],
        "notes": [text for check in found for text in named(check, check.notes)],
        "runs": [check.to_json() for check in found],
    }


def _lines(found: list[RunCheck]) -> list[str]:
    lines: list[str] = []
    for check in found:
        steps = "" if check.steps is None else f", {check.steps:,} steps"
        if check.earlier_steps:
            steps += f" after {check.earlier_steps:,} of earlier runs"
        lines.append(f"{check.run}: {'whole and closed' if check.ok else 'NOT whole'}{steps}")
        lines += [f"  problem: {text}" for text in check.problems]
        lines += [f"  note: {text}" for text in check.notes]
    return lines
