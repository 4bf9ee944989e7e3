"""How a run is counted in the budget of its people, from before its first step to its end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from userdp.budget.population import Population
from userdp.data.store import UserStore
from userdp.errors import InputError
from userdp.files.rows import RowsFile
from userdp.ledger.book import Ledger
from userdp.plan import Plan
from userdp.prices.earlier import Earlier
from userdp.prices.paid import Paid
from userdp.runs.facts import read_facts


def check_budget(
    people: Population, plan: Plan, paid: Sequence[Paid], earlier: Sequence[Earlier]
) -> None:
    """Refuse a new run that the budget has no room for, before it has written anything."""
    people.check(
        event=_event(plan, plan.steps),
        steps=plan.steps,
        adjacency=plan.adjacency,
        paid=paid,
        earlier=earlier,
    )


@contextmanager
def counted(
    people: Population,
    ledger: Ledger,
    run: Path | None,
    *,
    paid: Sequence[Paid],
    earlier: Sequence[Earlier],
) -> Iterator[None]:
    """Count all planned steps of a run now, and at its end what it cost.

    A run that was stopped keeps its place in the budget, because it can go on.
    """
    plan = ledger.plan

    def reserve() -> None:
        people.reserve(
            run=ledger.run_digest,
            what=f"training, {plan.steps:,} steps",
            where=run.name if run is not None else "",
            event=_event(plan, plan.steps),
            steps=plan.steps,
            adjacency=plan.adjacency,
            fixed_seed=ledger.fixed_seed,
            paid=paid,
            earlier=earlier,
        )

    reserve()
    try:
        yield
    except BaseException as error:
        is_refused = isinstance(error, InputError) and not ledger.steps
        if run is None or is_refused:
            settle(people, ledger)
        raise
    # Meanwhile a copy of this run may have been forked, and so settled at the steps of the copy.
    reserve()
    settle(people, ledger)


def settle(people: Population, ledger: Ledger) -> None:
    """Count what a run cost: its plan, and nothing if it took no step."""
    steps = ledger.priced_steps
    people.settle(ledger.run_digest, steps, _event(ledger.plan, steps), doubts=list(ledger.doubts))


def settle_parent(people: Population, parent: Path) -> None:
    """Count a run that is forked, and so will not go on, with what was seen to be wrong in it.

    If the fork is refused after all, it may go on: then its plan is counted again before.
    """
    # Under the lock: a run that goes on in another process keeps its place.
    held = RowsFile.open(parent / "ledger.jsonl")
    try:
        ledger = Ledger.read(parent / "ledger.jsonl")
        if people.counts(ledger.run_digest):
            settle(people, ledger)
    finally:
        held.close()


def settle_given_up(run: Path) -> bool:
    """Count a run that was given up: as planned, and for nothing if it took no step.

    False if its people cannot be found: the run does not say which store it was trained on, or the
    store is not there. Then all planned steps stay counted.
    """
    ledger = Ledger.read(run / "ledger.jsonl", without_torn_row=True)
    try:
        people = Population.of(UserStore.open(read_facts(run).store))
        if not people.counts(ledger.run_digest):
            return False
    except InputError:
        return False
    settle(people, ledger)
    return True


def released_about(people: Population, ledger: Ledger) -> dict[str, Any]:
    """What else was released about these people, for the closing row of a run."""
    plan = ledger.plan
    named = [item.run for item in ledger.earlier]
    others, epsilon = people.others(ledger.run_digest, plan.delta, plan.adjacency, named=named)
    cautions = list(people.cautions)
    if not others and not cautions:
        return {}
    known = others and math.isfinite(epsilon)
    return {"others": list(others), "epsilon": epsilon if known else None, "cautions": cautions}


def _event(plan: Plan, steps: int) -> Any:
    return plan.event(steps) if steps and plan.has_price else None
