"""The number that is printed: our own proven bound, checked by `dp_accounting` where that helps.

Our own bound is an upper bound by its proof (`docs/accounting.md`), at every delta and for every
event that has a price here. The library is independent code, so a mistake of ours would show; but
its transforms lose digits, and at small deltas its values fall below the truth. So it never lowers
what is told: where it is asked, the larger of the two numbers is printed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation

from userdp import __version__
from userdp.accounting import search, steps
from userdp.accounting.events import DpEvent
from userdp.accounting.prepared import joined
from userdp.errors import UnaccountedPlanError
from userdp.units import Adjacency

# Zero-out moves one user's clipped updates between "there" and "zero": the pair of output
# distributions, hence the privacy loss, is that of add/remove. Under replace `dp_accounting`
# compares a user at +C with one at -C, so the noise multiplier counts clip norms under every
# adjacency.
_RELATION = {
    Adjacency.ADD_REMOVE: NeighboringRelation.ADD_OR_REMOVE_ONE,
    Adjacency.ZERO_OUT: NeighboringRelation.REPLACE_SPECIAL,
    Adjacency.REPLACE: NeighboringRelation.REPLACE_ONE,
    # Zero-out again: who owns what is the same in both datasets, so the bounded records are too.
    Adjacency.FIXED_GRAPH_ZERO_OUT: NeighboringRelation.REPLACE_SPECIAL,
}

# Below this delta the library's digits are lost in its transforms, upwards or downwards.
SMALLEST_LIBRARY_DELTA = 1e-10
# Above this, exp(-loss) underflows there and epsilon reads about 1 too high.
LARGEST_LIBRARY_EPSILON = 700.0
# Work (`search.interval_for`) that takes it about half a second.
LARGEST_LIBRARY_WORK = 30_000

# How far our own bound is above the truth, relative, in every setting that was measured: up to so
# many steps and this epsilon. Measured, not proven; the grid is chosen for a tenth of it.
ERROR_BOUND = 5e-4
MOST_MEASURED_STEPS = 100_000
LARGEST_MEASURED_EPSILON = 2000.0

# The excess of epsilon, relative, that the library's discretisation may cause.
EXCESS = 1e-4
# Without sampling a fine grid costs nothing.
GAUSSIAN_EXCESS = 1e-6

# A curve of deltas is accurate down to far below this.
CURVE_DELTA = 1e-12


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """An epsilon, who vouches for it, and how far above the truth it may be (relative).

    `error_bound` says how close epsilon is, by measurement; infinite where nobody measured it. That
    epsilon is not below the truth does not depend on it.
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
    if adjacency not in _RELATION:
        raise UnaccountedPlanError(
            f"adjacency {adjacency.value!r} has no accounting rule here: use one of "
            f"{', '.join(repr(known.value) for known in _RELATION)}."
        )
    return _RELATION[adjacency]


def can_price(event: DpEvent, adjacency: Adjacency) -> bool:
    """Whether `evaluate` has a rule for the event; takes no evaluation to say.

    >>> can_price(dp_event.GaussianDpEvent(1.0), Adjacency.ADD_REMOVE)
    True
    >>> best_of_ten = dp_event.RepeatAndSelectDpEvent(dp_event.GaussianDpEvent(1.0), 10.0, 1.0)
    >>> can_price(best_of_ten, Adjacency.ADD_REMOVE)
    False
    """
    relation(adjacency)
    return steps.has_no_privacy(event) or steps.of(event, adjacency) is not None


def _steps(event: DpEvent, adjacency: Adjacency) -> list[steps.Step]:
    relation(adjacency)
    found = steps.of(event, adjacency)
    if found is None:
        raise UnaccountedPlanError(
            f"{own()} cannot price {type(event).__name__} under {adjacency.value} adjacency."
        )
    return found


def evaluate(event: DpEvent, *, delta: float, adjacency: Adjacency) -> Evaluation:
    """The epsilon to be told: an upper bound, with who vouches for it."""
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
    # The larger of the two: ours is proven, the library's is free of our mistakes.
    epsilon = max(bound, told)
    return Evaluation(
        epsilon=epsilon,
        certified_by=f"{library()} and {own()}, the larger of two upper bounds that agree within "
        f"{max(abs(told / bound - 1), 1e-6):.0e}",
        error_bound=epsilon / bound * (1 + _error_bound(mechanism, bound)) - 1,
    )


def _error_bound(mechanism: Sequence[steps.Step], bound: float) -> float:
    """How far our own bound is above the truth (relative); infinite where that was not measured."""
    is_measured = (
        search.NOTHING < bound <= LARGEST_MEASURED_EPSILON
        and sum(step.count for step in mechanism) <= MOST_MEASURED_STEPS
    )
    return ERROR_BOUND if is_measured else math.inf


def deltas(event: DpEvent, *, epsilons: list[float], adjacency: Adjacency) -> list[float]:
    """An upper bound on the delta that goes with each epsilon: the whole trade-off."""
    if steps.has_no_privacy(event):
        return [1.0] * len(epsilons)
    mechanism = _steps(event, adjacency)
    return [search.delta_bound(mechanism, epsilon, hint=CURVE_DELTA) for epsilon in epsilons]


def _library_epsilon(
    event: DpEvent,
    mechanism: list[steps.Step],
    bound: float,
    *,
    delta: float,
    adjacency: Adjacency,
) -> float | None:
    """The library's epsilon, on a grid that adds `EXCESS`; None where it is no help."""
    if (
        delta < SMALLEST_LIBRARY_DELTA
        or not search.NOTHING < bound <= LARGEST_LIBRARY_EPSILON
        or not PLDAccountant(relation(adjacency)).supports(event)
    ):
        return None
    excess = EXCESS
    match mechanism:
        case [steps.Mixture(is_gaussian=True, noise=noise)]:
            # In the library's own words: rate 1 is no sampling, which it would convolve.
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
        # It divides by the count of a part that never happens, and finds no bracket for a root
        # where a large group is almost surely there. Our own bound needs no second opinion to hold.
        return None


def _one_evaluation(
    event: DpEvent, *, delta: float, adjacency: Adjacency, interval: float
) -> float:
    accountant = PLDAccountant(relation(adjacency), value_discretization_interval=interval)
    accountant.compose(event)
    return max(0.0, float(accountant.get_epsilon(delta)))
