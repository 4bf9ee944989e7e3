"""`userdp budget`: what was spent on a store's people, by whom, and what is left."""

from __future__ import annotations

import math
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from userdp.accounting import accountant
from userdp.budget.population import DEFAULT_DELTA, Limit, Population, Spent
from userdp.cli import common
from userdp.data.store import UserStore
from userdp.errors import InputError
from userdp.statement import epsilon_text

BAR_WIDTH = 40
LEFT_NOTE = (
    "left is the limit less what is spent, rounded down. It is a guide only: events are composed, "
    "and their epsilons do not add up"
)
BEGUN_ANEW = "a new budget begins: what was spent on these people before is not counted"


def budget(
    store: Annotated[Path, typer.Argument(help="Directory of a user store.")],
    limit: Annotated[
        float | None, typer.Option(help="The epsilon that all releases together may cost.")
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(help="Delta of --limit, or alone: the delta at which spending is told."),
    ] = None,
    new: Annotated[
        bool,
        typer.Option("--new", help="Begin anew where the budget is lost; statements will say so."),
    ] = False,
    json: common.Json = False,
) -> None:
    """Say what was spent on these people, by whom, and what is left; set the limit."""
    if delta is not None:
        accountant.check_delta(delta)
    if limit is not None:
        accountant.check_epsilon(limit)
    opened = UserStore.open(store)
    population = Population.begin_anew(opened) if new else Population.of(opened)
    if new:
        common.say(BEGUN_ANEW)
    if limit is not None:
        population.set_limit(limit, _delta_of(population, delta))
    allowed = population.limit
    spent = population.spent(delta)
    entries = population.entries(spent.delta)
    left = _left(population, allowed, spent)
    common.emit(
        json,
        {
            "spent_epsilon": _finite(spent.epsilon),
            "delta": spent.delta,
            "limit": allowed.epsilon if allowed else None,
            "limit_delta": allowed.delta if allowed else None,
            "left": left,
            "entries": [entry | {"epsilon": _finite(entry["epsilon"])} for entry in entries],
            "problems": list(spent.problems),
            "cautions": list(spent.cautions),
            "certified_by": spent.certified_by,
            "population": population.id,
            "file": str(population.path),
        },
        "" if json else _words(population, spent, allowed, left, entries, told=delta is not None),
    )


def _delta_of(population: Population, delta: float | None) -> float:
    """The delta of a new limit: as given, or else the delta of the limit before."""
    before = population.limit
    if delta is None and before is None:
        raise InputError("--limit needs --delta: an epsilon says nothing without it. Try 1e-6.")
    return delta if delta is not None else before.delta if before else DEFAULT_DELTA


def _left(population: Population, limit: Limit | None, spent: Spent) -> float | None:
    """The limit less what is spent, both at the limit's delta, rounded down; None if not known."""
    if limit is None:
        return None
    same = spent if spent.delta == limit.delta else population.spent(limit.delta)
    if same.epsilon is None:
        return None
    rest = max(0.0, limit.epsilon - same.epsilon)
    return math.floor(rest * 1e6) / 1e6


def _finite(epsilon: float | None) -> float | None:
    """JSON has no infinity; `problems` say why there is no number."""
    return epsilon if epsilon is not None and math.isfinite(epsilon) else None


def _words(
    population: Population,
    spent: Spent,
    limit: Limit | None,
    left: float | None,
    entries: list[dict[str, Any]],
    *,
    told: bool,
) -> str:
    table = Table(box=None, pad_edge=False)
    for title in ("what", "run", "in"):
        table.add_column(title, overflow="fold")
    table.add_column("alone, epsilon", justify="right")
    for entry in entries:
        table.add_row(
            entry["what"] + (" (planned)" if entry["is_planned"] else ""),
            (entry["run"] or "")[:12],
            entry["where"],
            epsilon_text(entry["epsilon"]),
        )
    screen = StringIO()
    if entries:
        # What is printed is as it was written: no colours, and no signs with a meaning.
        plain = Console(
            file=screen, width=100, markup=False, emoji=False, no_color=True, force_terminal=False
        )
        plain.print(table)
    lines = [screen.getvalue().rstrip()] if entries else ["nothing was spent on these people"]
    if limit is None:
        why = "as asked" if told else "the default where no limit is set"
        lines.append(f"spent: {_told(spent)} at delta={spent.delta:g} ({why}); no limit is set")
    else:
        lines.append(f"spent: {_told(spent)} at delta={spent.delta:g}")
        lines.append(_bar(left, limit))
        lines.append(LEFT_NOTE)
    lines += [f"problem: {problem}" for problem in spent.problems]
    lines += [f"caution: {caution}" for caution in spent.cautions]
    lines.append(f"counted in {population.path}; copies of the data elsewhere are not seen")
    return "\n".join(lines)


def _told(spent: Spent) -> str:
    if spent.epsilon is None:
        return "no number"
    return f"epsilon={epsilon_text(spent.epsilon)}"


def _bar(left: float | None, limit: Limit) -> str:
    """Spent and left, of the limit. A part that is spent is never drawn as left."""
    free = math.floor(BAR_WIDTH * left / limit.epsilon) if left else 0
    shown = "not known" if left is None else f"{math.floor(left * 1e3) / 1e3:g}"
    return (
        f"[{'#' * (BAR_WIDTH - free)}{'.' * free}] left: {shown} of {limit.epsilon} at "
        f"delta={limit.delta:g}"
    )
