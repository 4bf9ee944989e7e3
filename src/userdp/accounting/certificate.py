"""The number that is printed: one evaluation by `dp_accounting`, or who vouches instead.

Our own search is fast and an upper bound by its own proof; what is told to people is still checked
by an independent library, `dp_accounting`, in both directions. Its cost and its excess depend on
the discretisation interval: the search knows which interval adds 0.01% and no more, so that one
evaluation is enough. Where the library cannot answer (delta at or below 1e-15, epsilon above 700,
millions of intervals) our own bound stands, and says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation

from userdp import __version__
from userdp.accounting import search
from userdp.accounting.events import DpEvent
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

# `dp_accounting` adds 1e-15 to delta when it composes; below this delta that shows in epsilon.
SMALLEST_LIBRARY_DELTA = 1e-13
# Above this, exp(-loss) underflows there and epsilon reads about 1 too high.
LARGEST_LIBRARY_EPSILON = 700.0
# Discretisation intervals times mixture components that take it about a minute.
LARGEST_LIBRARY_WORK = 20_000_000

# The excess of epsilon, relative, that the library's discretisation may cause.
EXCESS = 1e-4
# Without sampling a fine grid costs nothing.
GAUSSIAN_EXCESS = 1e-6

# Spacing of the discretised privacy loss where nothing is known: start, refinement, end.
COARSEST_INTERVAL = 1e-2
REFINEMENT = 5.0
FINEST_INTERVAL = 1e-5


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """An epsilon, who vouches for it, and how far above the truth it may be (relative)."""

    epsilon: float
    certified_by: str
    error_bound: float


def library() -> str:
    """The independent accountant, by name and version."""
    return f"dp_accounting {version('dp-accounting')} PLD"


def own() -> str:
    """Our own bound, by name and version."""
    return f"userdp {__version__} PLD"


def mixtures(event: DpEvent, count: int = 1) -> list[search.Mixture] | None:
    """The event as steps our own search can price, or None.

    >>> event = dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(2.0), 3)
    >>> [step.count for step in mixtures(event) or []]
    [3]
    """
    one, zero_one = np.array([1.0]), np.array([0.0, 1.0])
    match event:
        case dp_event.NoOpDpEvent():
            return []
        case dp_event.SelfComposedDpEvent():
            return mixtures(event.event, count * event.count)
        case dp_event.ComposedDpEvent():
            parts = [mixtures(part, count) for part in event.events]
            if any(part is None for part in parts):
                return None
            return [step for part in parts if part is not None for step in part]
        case dp_event.GaussianDpEvent():
            if event.noise_multiplier <= 0:
                return None
            return [
                search.Mixture(noise=event.noise_multiplier, shifts=one, weights=one, count=count)
            ]
        case dp_event.PoissonSampledDpEvent() if isinstance(event.event, dp_event.GaussianDpEvent):
            rate, noise = event.sampling_probability, event.event.noise_multiplier
            if noise <= 0:
                return None
            if rate >= 1:
                return mixtures(event.event, count)
            weights = np.array([1 - rate, rate])
            return [search.Mixture(noise=noise, shifts=zero_one, weights=weights, count=count)]
        case dp_event.MixtureOfGaussiansDpEvent() if event.standard_deviation > 0:
            shifts = np.asarray(event.sensitivities, dtype=np.float64)
            weights = np.asarray(event.sampling_probs, dtype=np.float64)
            kept = weights > 0
            return [
                search.Mixture(
                    noise=event.standard_deviation,
                    shifts=shifts[kept],
                    weights=weights[kept],
                    count=count,
                )
            ]
        case _:
            return None


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
    if mixtures(event) is not None and (adjacency is not Adjacency.REPLACE or _is_mixture(event)):
        relation(adjacency)
        return True
    return PLDAccountant(relation(adjacency)).supports(event)


def evaluate(event: DpEvent, *, delta: float, adjacency: Adjacency) -> Evaluation:
    """The epsilon to be told: an upper bound, with who vouches for it."""
    relation(adjacency)
    steps = mixtures(event)
    if steps is not None and len(steps) == 0:
        return Evaluation(epsilon=0.0, certified_by=own(), error_bound=0.0)
    if adjacency is Adjacency.REPLACE and steps is not None and _is_mixture(event):
        return _replace(steps, delta)
    if steps is None or adjacency is Adjacency.REPLACE:
        return _library_alone(event, delta=delta, adjacency=adjacency)
    steps, excess = search.joined(steps), EXCESS
    if all(step.is_gaussian for step in steps):
        # Told in the library's own words for it: rate 1 is no sampling, which it would convolve.
        event, excess = dp_event.GaussianDpEvent(steps[0].noise), GAUSSIAN_EXCESS
    bound = search.epsilon_bound(steps, delta)
    interval, work = search.interval_for(steps, bound, delta, excess)
    if (
        delta < SMALLEST_LIBRARY_DELTA
        or bound > LARGEST_LIBRARY_EPSILON
        or work > LARGEST_LIBRARY_WORK
        or bound <= search.NOTHING
    ):
        return Evaluation(
            epsilon=bound,
            certified_by=f"{own()} (its own upper bound; {library()} cannot evaluate this)",
            error_bound=10 * search.TOLERANCE,
        )
    told = _one_evaluation(event, delta=delta, adjacency=adjacency, interval=interval)
    # Two upper bounds of one number. Ours is proved, so a library value below it is as sound; a
    # library value well above it is only looser.
    if not told <= bound * (1 + 10 * EXCESS):
        return Evaluation(
            epsilon=bound,
            certified_by=f"{own()} (its own upper bound; {library()} says {told:.6g})",
            error_bound=10 * search.TOLERANCE,
        )
    return Evaluation(
        epsilon=told,
        certified_by=f"{library()}; searched by {own()}, which agrees within "
        f"{max(abs(told / bound - 1), 1e-6):.0e}",
        error_bound=excess,
    )


def _is_mixture(event: DpEvent) -> bool:
    match event:
        case dp_event.SelfComposedDpEvent():
            return _is_mixture(event.event)
        case dp_event.ComposedDpEvent():
            return any(_is_mixture(part) for part in event.events)
        case _:
            return isinstance(event, dp_event.MixtureOfGaussiansDpEvent)


def _replace(steps: list[search.Mixture], delta: float) -> Evaluation:
    """Replacing a user is removing one and adding another: the guarantees chain.

    P <= e^e1 Q + d1 and Q <= e^e2 R + d2 give P <= e^(e1 + e2) R + d1 + e^e1 d2. An upper bound,
    not tight: `dp_accounting` has no rule for mixtures under replace, and neither has the paper.
    """
    first = search.epsilon_in(steps, search.Direction.REMOVE, delta / 2)
    second_delta = delta / 2 * math.exp(-min(first, 700.0))
    second = math.inf
    if first < 500 and second_delta > 1e-250:
        second = search.epsilon_in(steps, search.Direction.ADD, second_delta)
    return Evaluation(
        epsilon=first + second,
        certified_by=f"{own()} (remove one user, then add another; an upper bound, not tight)",
        error_bound=math.inf,
    )


def _one_evaluation(
    event: DpEvent, *, delta: float, adjacency: Adjacency, interval: float
) -> float:
    accountant = PLDAccountant(relation(adjacency), value_discretization_interval=interval)
    accountant.compose(event)
    return max(0.0, float(accountant.get_epsilon(delta)))


def deltas(event: DpEvent, *, epsilons: list[float], adjacency: Adjacency) -> list[float]:
    """The delta that goes with each epsilon: the whole trade-off the event offers."""
    if adjacency is Adjacency.REPLACE and mixtures(event) is not None and _is_mixture(event):
        # As in `_replace`, with half of epsilon for leaving and half for joining.
        halves = [value / 2 for value in epsilons]
        one_way = deltas(event, epsilons=halves, adjacency=Adjacency.ADD_REMOVE)
        return [
            min(1.0, delta * (1 + math.exp(min(half, 700.0))))
            for half, delta in zip(halves, one_way, strict=True)
        ]
    accountant = PLDAccountant(relation(adjacency), value_discretization_interval=1e-3)
    accountant.compose(event)
    return [float(accountant.get_delta(value)) for value in epsilons]


def _library_alone(event: DpEvent, *, delta: float, adjacency: Adjacency) -> Evaluation:
    """The library's epsilon where our search has no rule: refined until it no longer matters."""
    if not PLDAccountant(relation(adjacency)).supports(event):
        raise UnaccountedPlanError(
            f"{library()} cannot price {type(event).__name__} under {adjacency.value} adjacency."
        )

    def bound(interval: float) -> float:
        return _one_evaluation(event, delta=delta, adjacency=adjacency, interval=interval)

    # Every interval gives an upper bound, at a cost that grows as it shrinks; the excess shrinks
    # with its square. So refine until what is left, judged from the last two bounds, no longer
    # matters.
    interval = COARSEST_INTERVAL
    best = bound(interval)
    excess = math.inf
    while interval > FINEST_INTERVAL and best > 0:
        interval /= REFINEMENT
        finer = bound(interval)
        excess = (best - finer) / (REFINEMENT**2 - 1) if math.isfinite(best) else math.inf
        best = min(best, finer)
        if abs(excess) <= EXCESS * best:
            break
    return Evaluation(epsilon=best, certified_by=library(), error_bound=EXCESS)
