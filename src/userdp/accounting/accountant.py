"""Epsilon of an event, and the noise multiplier that reaches a target epsilon.

Every number is an upper bound computed by `dp_accounting` from the privacy loss distribution
(connect-the-dots discretisation, pessimistic), the worse of the two directions. Reading an epsilon
has no side effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.metadata import version

from dp_accounting.pld import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation
from scipy.optimize import brentq

from userdp.accounting.events import DpEvent
from userdp.errors import InputError, UnaccountedPlanError
from userdp.units import Adjacency

# Zero-out moves one user's clipped updates between "there" and "zero": the pair of output
# distributions, hence the privacy loss, is that of add/remove.
_RELATION = {
    Adjacency.ADD_REMOVE: NeighboringRelation.ADD_OR_REMOVE_ONE,
    Adjacency.ZERO_OUT: NeighboringRelation.REPLACE_SPECIAL,
    Adjacency.FIXED_GRAPH_ZERO_OUT: NeighboringRelation.REPLACE_SPECIAL,
}

# `dp_accounting` adds 1e-15 to delta when it composes, so it cannot certify anything smaller.
SMALLEST_DELTA = 1e-15

# Spacing of the discretised privacy loss: where refinement starts, how it goes on, where it must end.
COARSEST_INTERVAL = 1e-2
REFINEMENT = 5.0
FINEST_INTERVAL = 1e-5
DISCRETISATION_TOLERANCE = 1e-4

# Calibration searches noise multipliers up to here; beyond it no model would learn anything.
LARGEST_NOISE_MULTIPLIER = 1e6

# Calibrated noise is at most this much (relative) above the smallest that meets the target.
CALIBRATION_TOLERANCE = 5e-5


def certified_by() -> str:
    """Who vouches for the numbers of this module."""
    return f"dp_accounting {version('dp-accounting')} PLD"


def check_delta(delta: float) -> None:
    """Refuse a delta that is no probability, or that the accountant cannot certify."""
    if not 0.0 < delta < 1.0:
        raise InputError(f"delta={delta} is not a probability strictly between 0 and 1.")
    if delta <= SMALLEST_DELTA:
        raise InputError(
            f"delta={delta} cannot be certified: {certified_by()} adds {SMALLEST_DELTA} to delta "
            f"when it composes steps. Use a delta above {SMALLEST_DELTA}."
        )


def epsilon(event: DpEvent, *, delta: float, adjacency: Adjacency) -> float:
    """The smallest certified epsilon at which `event` is (epsilon, delta)-DP; infinite if none is.

    >>> from userdp.accounting import events
    >>> step = events.poisson_users_gaussian(user_sampling_prob=0.01, noise_multiplier=2.0)
    >>> round(epsilon(events.repeated(step, 2000), delta=1e-6, adjacency=Adjacency.ADD_REMOVE), 3)
    1.035
    """
    check_delta(delta)
    relation = _relation(adjacency)
    if not PLDAccountant(relation).supports(event):
        raise UnaccountedPlanError(
            f"{certified_by()} cannot price {type(event).__name__} under {adjacency.value} adjacency."
        )

    def bound(interval: float) -> float:
        accountant = PLDAccountant(relation, value_discretization_interval=interval)
        accountant.compose(event)
        return max(0.0, float(accountant.get_epsilon(delta)))

    # Every interval gives an upper bound, at a cost that grows as it shrinks; the excess shrinks with
    # its square. So refine until what is left, judged from the last two bounds, no longer matters.
    interval = COARSEST_INTERVAL
    best = bound(interval)
    while interval > FINEST_INTERVAL:
        interval /= REFINEMENT
        finer = bound(interval)
        excess = (best - finer) / (REFINEMENT**2 - 1) if math.isfinite(best) else math.inf
        best = min(best, finer)
        if abs(excess) <= DISCRETISATION_TOLERANCE * best:
            break
    return best


def deltas(event: DpEvent, *, epsilons: list[float], adjacency: Adjacency) -> list[float]:
    """The delta that goes with each epsilon: the whole trade-off the event offers, as upper bounds."""
    accountant = PLDAccountant(_relation(adjacency), value_discretization_interval=1e-3)
    accountant.compose(event)
    return [float(accountant.get_delta(value)) for value in epsilons]


def calibrate(
    event_of: Callable[[float], DpEvent], *, target: float, delta: float, adjacency: Adjacency
) -> float:
    """The smallest noise multiplier (to 0.005%) at which the event's epsilon is at most `target`.

    `event_of` maps a noise multiplier to the event of the whole run.

    Guarantee: `epsilon(event_of(result)) <= target`, checked by evaluating it.
    """
    check_epsilon(target)
    check_delta(delta)

    # Log epsilon is close to linear in log noise, so the root is found in a handful of evaluations.
    known: dict[float, float] = {}

    def excess(log_noise: float) -> float:
        if log_noise not in known:
            value = epsilon(event_of(math.exp(log_noise)), delta=delta, adjacency=adjacency)
            known[log_noise] = math.log(max(value, 1e-300) / target)
        return known[log_noise]

    # Walk down from much noise: evaluations get dearer as the noise gets smaller.
    high = math.log(8.0)
    while excess(high) > 0:
        high += math.log(4.0)
        if high > math.log(LARGEST_NOISE_MULTIPLIER):
            feasible = target * math.exp(min(known.values()))
            raise InputError(
                f"epsilon={target} is out of reach at delta={delta}: even noise_multiplier="
                f"{LARGEST_NOISE_MULTIPLIER:.0e} gives no less than {feasible:.3g}. Use fewer steps, a "
                "smaller sampling rate, or an epsilon above that."
            )
    low = high
    while excess(low) <= 0:
        high, low = low, low - math.log(2.0)
        if low < math.log(1e-3):
            return math.exp(high)

    root = brentq(excess, low, high, xtol=CALIBRATION_TOLERANCE / 4, rtol=1e-12)
    while excess(root) > 0:
        root += CALIBRATION_TOLERANCE / 4
    return math.exp(root)


def _relation(adjacency: Adjacency) -> NeighboringRelation:
    if adjacency not in _RELATION:
        raise UnaccountedPlanError(
            f"adjacency {adjacency.value!r} has no accounting rule here: "
            f"use {' or '.join(repr(known.value) for known in _RELATION)}."
        )
    return _RELATION[adjacency]


def check_epsilon(target: float) -> None:
    """Refuse a target epsilon that is not a positive finite number."""
    if not (math.isfinite(target) and target > 0):
        raise InputError(f"epsilon={target} is not a positive finite number.")
