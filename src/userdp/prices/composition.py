"""Everything that one person's data was used for, together: steps, paid looks, earlier runs.

Events are composed, never epsilons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from userdp.accounting import accountant, events
from userdp.accounting.certificate import Evaluation
from userdp.errors import UnaccountedPlanError
from userdp.prices.earlier import Earlier, by_people
from userdp.prices.paid import Paid, all_events
from userdp.statement import epsilon_text
from userdp.units import Adjacency


def check_together(
    steps: Sequence[events.DpEvent],
    paid: Sequence[Paid],
    earlier: Sequence[Earlier],
    adjacency: Adjacency,
) -> None:
    """Refuse paid items and earlier runs that cannot be priced together with these steps."""
    others = [*all_events(paid), *by_people(earlier)[0]]
    parts = [*others, *steps]
    if parts and not accountant.can_price(events.combined(parts), adjacency):
        kinds = {type(event).__name__ for event in others}
        raise UnaccountedPlanError(
            f"{', '.join(sorted(kinds))} cannot be priced together with these steps under "
            f"{adjacency.value} adjacency. Pay with an event that has a privacy loss distribution, "
            "such as a Gaussian one, or with a tuning of runs that sample users."
        )


def check_inherited(item: Earlier, adjacency: Adjacency, *, non_private: bool) -> None:
    """Refuse an earlier run that a run under this adjacency cannot be priced with."""
    if item.non_private and not non_private:
        raise UnaccountedPlanError(
            "the weights come from a run without privacy: nothing can be promised for what is "
            "trained on from them. Start from other weights, or set non_private."
        )
    if item.adjacency is not adjacency:
        raise UnaccountedPlanError(
            f"the weights come from a run under {item.adjacency.value} adjacency and this plan "
            f"is under {adjacency.value}: they cannot be priced together. Plan with "
            f"adjacency={item.adjacency.value!r}, or start from other weights."
        )


def total_events(
    steps: Sequence[events.DpEvent], paid: Sequence[Paid], earlier: Sequence[Earlier]
) -> list[events.DpEvent]:
    """What the data of each group of people was used for. Unused data has no event.

    There is one group, unless earlier runs were declared to be on other people. Then each person is
    in one group, and a statement must cover the group with the highest price.
    """
    groups = by_people(earlier)
    groups[0] += [*all_events(paid), *steps]
    return [events.combined(parts) for parts in groups.values() if parts]


def dearest(
    together: Sequence[events.DpEvent], *, delta: float, adjacency: Adjacency
) -> Evaluation:
    """The largest epsilon of the groups of people, and who vouches for it."""
    found = [accountant.evaluate(event, delta=delta, adjacency=adjacency) for event in together]
    nothing = Evaluation(epsilon=0.0, certified_by="nobody", error_bound=0.0)
    return max(found, key=lambda one: one.epsilon, default=nothing)


def curve(
    together: Sequence[events.DpEvent],
    epsilons: list[float],
    *,
    delta: float,
    adjacency: Adjacency,
) -> list[float]:
    """The largest delta of the groups of people that goes with each epsilon."""
    curves = [
        accountant.deltas(event, epsilons=epsilons, delta=delta, adjacency=adjacency)
        for event in together
    ]
    return [max(values) for values in zip(*curves, strict=True)]


def paid_in_words(item: Paid, delta: float, adjacency: Adjacency) -> str:
    """A look at the data, with its price alone."""
    alone = accountant.epsilon(item.event, delta=delta, adjacency=adjacency)
    return f"{item.what}: alone epsilon={epsilon_text(alone)}, included in the total"


def earlier_in_words(
    item: Earlier, delta: float, adjacency: Adjacency, *, unpromised: str = ""
) -> str:
    """An earlier run behind the weights, with its price alone.

    `unpromised` is why that run promised nothing to its own people, if so.
    """
    alone = math.inf if item.non_private else 0.0
    if item.events() and not item.non_private:
        event = events.combined(item.events())
        alone = accountant.epsilon(event, delta=delta, adjacency=adjacency)
    why = f" that promised nothing ({unpromised})" if unpromised else ""
    run = f"{item.steps:,} steps of an earlier run{why}, alone epsilon={epsilon_text(alone)}"
    if item.people == 0:
        return f"{run}, included in the total"
    return f"{run}, on people declared to be others: the largest epsilon of the groups is stated"
