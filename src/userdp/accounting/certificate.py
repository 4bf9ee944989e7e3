"""The number that is printed: our own proven bound, checked by `dp_accounting` where that helps.

Our own bound is an upper bound at every delta, for every event that has a price here; the proof is
in `docs/accounting.md`. The library is independent code, so it would show a mistake of ours. But
its transforms lose digits, and at small deltas its values fall below the truth. So the library
never lowers the printed number: where it is asked, the larger of the two numbers is printed.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import attrs
import numpy as np
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation

from userdp import __version__
from userdp.accounting import search, steps
from userdp.accounting.allocation import Allocated
from userdp.accounting.events import DpEvent
from userdp.accounting.prepared import joined
from userdp.accounting.without_replacement import Drawn
from userdp.errors import UnaccountedPlanError
from userdp.units import Adjacency

# Under zero-out, one user's clipped updates are there or are zero. So the two output distributions,
# and the privacy loss, are those of add/remove. Under replace, `dp_accounting` compares a user at
# +C with one at -C. So under every adjacency the noise multiplier counts clip norms.
_RELATION = {
    Adjacency.ADD_REMOVE: NeighboringRelation.ADD_OR_REMOVE_ONE,
    Adjacency.ZERO_OUT: NeighboringRelation.REPLACE_SPECIAL,
    Adjacency.REPLACE: NeighboringRelation.REPLACE_ONE,
    # This is zero-out too: both datasets have the same owners, hence the same bounded records.
    Adjacency.FIXED_GRAPH_ZERO_OUT: NeighboringRelation.REPLACE_SPECIAL,
    # The coins of a user's records are the same on both sides, and what they say is exchanged.
    Adjacency.FIXED_GRAPH_REPLACE: NeighboringRelation.REPLACE_ONE,
}

# At smaller deltas the library's transforms lose its digits, upwards or downwards.
SMALLEST_LIBRARY_DELTA = 1e-10
# At larger epsilons exp(-loss) underflows in the library, and its epsilon is about 1 too high.
LARGEST_LIBRARY_EPSILON = 700.0
# With this much work (`search.interval_for`) the library takes about half a second.
LARGEST_LIBRARY_WORK = 30_000

# Our own bound is at most this much (relative) above the truth in every setting that was measured.
# Those settings have at most so many steps, and at most this epsilon. This is measured, not proven.
# The grid is chosen for a tenth of it.
ERROR_BOUND = 5e-4
MOST_MEASURED_STEPS = 100_000
LARGEST_MEASURED_EPSILON = 2000.0

# The library's grid may add this much (relative) to epsilon.
EXCESS = 1e-4
# Without sampling a fine grid costs nothing.
GAUSSIAN_EXCESS = 1e-6

# The grids of a curve are chosen for about this delta; it is accurate far below it.
CURVE_DELTA = 1e-12


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """An epsilon, who vouches for it, and how far above the truth it may be (relative).

    `error_bound` says how close epsilon is. It was measured, and is infinite where nobody measured
    it. The proof that epsilon is not below the truth does not use it.
    """

    epsilon: float
    certified_by: str
    error_bound: float


def library() -> str:
    """The independent accountant, by name and version."""
    return f"dp_accounting {version('dp-accounting')} PLD"


def own() -> str:
    """Our own bound, by name and version."""
    return f"userdp {__version__} PLD"


def relation(adjacency: Adjacency) -> NeighboringRelation:
    """The library's name for the adjacency."""
    return _RELATION[adjacency]


def can_price(event: DpEvent, adjacency: Adjacency) -> bool:
    """Whether `evaluate` has a rule for the event. Nothing is evaluated.

    >>> can_price(dp_event.GaussianDpEvent(1.0), Adjacency.ADD_REMOVE)
    True
    >>> best_of_ten = dp_event.RepeatAndSelectDpEvent(dp_event.GaussianDpEvent(1.0), 10.0, 1.0)
    >>> can_price(best_of_ten, Adjacency.ADD_REMOVE)
    False
    """
    return steps.has_no_privacy(event) or steps.of(event, adjacency) is not None


def _steps(event: DpEvent, adjacency: Adjacency) -> list[steps.Step]:
    found = steps.of(event, adjacency)
    if found is None:
        raise UnaccountedPlanError(
            f"{own()} cannot price {type(event).__name__} under {adjacency.value} adjacency."
        )
    return found


def evaluate(event: DpEvent, *, delta: float, adjacency: Adjacency) -> Evaluation:
    """The epsilon to print, which is an upper bound, and who vouches for it."""
    if steps.has_no_privacy(event):
        return Evaluation(epsilon=math.inf, certified_by=own(), error_bound=0.0)
    mechanism = joined(_steps(event, adjacency))
    if not mechanism:
        return Evaluation(epsilon=0.0, certified_by=own(), error_bound=0.0)
    bound = search.epsilon_bound(mechanism, delta)
    told = _library_epsilon(event, mechanism, bound, delta=delta, adjacency=adjacency)
    if told is None:
        return Evaluation(
            epsilon=bound,
            certified_by=f"{own()} (a proven upper bound; {library()} cannot check it here)",
            error_bound=_error_bound(mechanism, bound),
        )
    # Ours is proven, and the library's is free of our mistakes.
    epsilon = max(bound, told)
    return Evaluation(
        epsilon=epsilon,
        certified_by=f"{library()} and {own()}, the larger of two upper bounds that agree within "
        f"{max(abs(told / bound - 1), 1e-6):.0e}",
        error_bound=epsilon / bound * (1 + _error_bound(mechanism, bound)) - 1,
    )


def _error_bound(mechanism: Sequence[steps.Step], bound: float) -> float:
    """How far our own bound is above the truth (relative); infinite where nobody measured it."""
    # Blocks are an upper bound on several participations, and the price of many steps without
    # replacement is one on what a single attacker can reach.
    bounded = [one for one in mechanism if isinstance(one, Allocated | Drawn)]
    is_measured = (
        sum(one.count for one in bounded) <= 1
        and search.NOTHING < bound <= LARGEST_MEASURED_EPSILON
        and sum(step.count for step in mechanism) <= MOST_MEASURED_STEPS
    )
    return ERROR_BOUND if is_measured else math.inf


def deltas(event: DpEvent, *, epsilons: list[float], adjacency: Adjacency) -> list[float]:
    """An upper bound on the delta that belongs to each epsilon: the whole trade-off."""
    if steps.has_no_privacy(event):
        return [1.0] * len(epsilons)
    mechanism = _steps(event, adjacency)
    if not mechanism:
        return [0.0] * len(epsilons)
    return [search.delta_bound(mechanism, epsilon, hint=CURVE_DELTA) for epsilon in epsilons]


def _library_epsilon(
    event: DpEvent,
    mechanism: list[steps.Step],
    bound: float,
    *,
    delta: float,
    adjacency: Adjacency,
) -> float | None:
    """The library's epsilon on a grid that adds `EXCESS`; None where the library cannot help."""
    if (
        delta < SMALLEST_LIBRARY_DELTA
        or not search.NOTHING < bound <= LARGEST_LIBRARY_EPSILON
        or not PLDAccountant(relation(adjacency)).supports(event)
    ):
        return None
    excess = EXCESS
    match mechanism:
        case [steps.Mixture(is_gaussian=True, noise=noise)]:
            # Without sampling the library has a closed form. It would convolve steps of rate 1.
            event, adjacency = dp_event.GaussianDpEvent(noise), Adjacency.ADD_REMOVE
            excess = GAUSSIAN_EXCESS
        case _:
            pass
    interval, work = search.interval_for(mechanism, bound, delta, excess)
    if work > LARGEST_LIBRARY_WORK:
        return None
    try:
        return _one_evaluation(event, delta=delta, adjacency=adjacency, interval=interval)
    except (ArithmeticError, ValueError):
        # The library divides by the count of a part that never happens. It finds no bracket for a
        # root where a large group is almost surely there. Our own bound holds without it.
        return None


def _one_evaluation(
    event: DpEvent, *, delta: float, adjacency: Adjacency, interval: float
) -> float:
    asked = _Asked(numbers=_numbers(event), event=event)
    accountant = _composed(PLDAccountant, asked, relation(adjacency), interval)
    return max(0.0, float(accountant.get_epsilon(delta)))


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """An event that is found again by all its numbers. It may hold lists, which have no hash."""

    numbers: Hashable
    event: DpEvent = field(compare=False)


def _numbers(value: Any) -> Hashable:
    """Everything that an event is made of, with its types: 1 and 1.0 are not the same here."""
    if isinstance(value, DpEvent):
        return (type(value), *map(_numbers, attrs.astuple(value, recurse=False)))
    if isinstance(value, list | tuple | np.ndarray):
        return (type(value), *map(_numbers, value))
    return (type(value), value)


# A run asks for the price of the same event several times: for its plan, for the budget of its
# people, and for each of its papers. Composing it takes the library up to half a second. Only what
# the library composed is kept, in this process alone: no epsilon is, and our own bound is computed
# afresh each time, so what is printed is still never below it.
@lru_cache(maxsize=16)
def _composed(
    accountant: type[PLDAccountant], asked: _Asked, relation: NeighboringRelation, interval: float
) -> PLDAccountant:
    """The library's accountant after the event."""
    made = accountant(relation, value_discretization_interval=interval)
    made.compose(asked.event)
    return made
