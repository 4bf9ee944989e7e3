"""Epsilon of an event, and the noise multiplier that reaches a target epsilon.

Every number is an upper bound, in the worse of the two directions. `certificate` computes it, or
`rdp_and_pld` where a part has no privacy loss distribution. Each number is computed afresh, which
takes some ten milliseconds. A stored number could outlive the correction of a mistake in it.
(`certificate` keeps what the library composed for its check, in this process alone.) Reading an
epsilon spends nothing of any budget.

Reference: Charles et al. 2024, App. A.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from userdp.accounting import (
    added,
    certificate,
    correlated_bins,
    least_noise,
    rdp_and_pld,
    roots,
    steps,
)
from userdp.accounting.certificate import Evaluation
from userdp.accounting.events import DpEvent
from userdp.accounting.own_events import BallsInBinsBandedDpEvent
from userdp.errors import InputError
from userdp.units import Adjacency, too_large

# Below this, a tail that may be cut off is smaller than any double.
SMALLEST_DELTA = 1e-250

# Smaller targets would need finer grids than doubles can represent.
SMALLEST_EPSILON = 1e-4

# Calibration tries no larger noise multiplier. With more noise no model would learn anything.
LARGEST_NOISE_MULTIPLIER = 1e8

# The search aims this much (relative) below the target epsilon. The certificate may lie above the
# search by `certificate.EXCESS`, and then still meets the target.
MARGIN = 2e-4

# Without a fast search, calibrated noise is at most this much (relative) above the least.
CALIBRATION_TOLERANCE = 5e-5
# How many simulated epsilons decide on the noise.
_SIMULATIONS = 6
# Without a fast search, no noise multiplier below this is tried.
LEAST_EVALUATED_NOISE = 1e-3


def certified_by() -> str:
    """Who vouches for the numbers of this module in general; `evaluate` says so for each one."""
    return f"{certificate.library()} and {certificate.own()}, the larger of two upper bounds"


def check_delta(delta: float, *, num_users: int | None = None) -> None:
    """Refuse a delta that is no probability, too small to compute with, or too large for the users.

    `num_users` is None where nobody says how many there are, or where nothing is promised to them.
    """
    if not 0.0 < delta < 1.0:
        raise InputError(f"delta={delta} is not a probability strictly between 0 and 1.")
    if delta < SMALLEST_DELTA:
        raise InputError(
            f"delta={delta} is below {SMALLEST_DELTA}, the smallest that can be computed with. "
            "Use a larger delta: 1/num_users^1.1 is common."
        )
    if num_users is not None and (why := too_large(delta, num_users)):
        raise InputError(f"{why}. Choose a smaller delta: 1/num_users^1.1 is common.")


def check_epsilon(target: float) -> None:
    """Refuse a target epsilon that is not a positive finite number."""
    if not (math.isfinite(target) and target > 0):
        raise InputError(f"epsilon={target} is not a positive finite number.")


def can_price(event: DpEvent, adjacency: Adjacency) -> bool:
    """Whether `evaluate` has a rule for the event. Nothing is evaluated."""
    parts = added.split(event)
    if parts is not None:
        return parts.rest is None or can_price(parts.rest, adjacency)
    return certificate.can_price(event, adjacency) or rdp_and_pld.can_price(event, adjacency)


def evaluate(event: DpEvent, *, delta: float, adjacency: Adjacency) -> Evaluation:
    """The smallest certified epsilon at which `event` is (epsilon, delta)-DP, and who says so."""
    check_delta(delta)
    parts = added.split(event)
    if parts is not None:
        return parts.evaluated(
            lambda rest, left: evaluate(rest, delta=left, adjacency=adjacency), delta
        )
    if isinstance(event, BallsInBinsBandedDpEvent) and certificate.can_price(event, adjacency):
        return _of_correlated_bins(event, delta=delta, adjacency=adjacency)
    rule = certificate if certificate.can_price(event, adjacency) else rdp_and_pld
    return rule.evaluate(event, delta=delta, adjacency=adjacency)


def _of_correlated_bins(
    event: BallsInBinsBandedDpEvent, *, delta: float, adjacency: Adjacency
) -> Evaluation:
    """The least of several proven bounds, or a simulated one that is smaller still."""
    best = min(
        (
            certificate.evaluate(one, delta=delta, adjacency=adjacency)
            for one in (event, *correlated_bins.proven(event)[1:])
        ),
        key=lambda found: found.epsilon,
    )
    if not math.isfinite(best.epsilon):
        return best
    # A proven bound is close to what it prices, and that may be far above the run itself.
    best = replace(best, error_bound=math.inf)
    simulated = correlated_bins.simulated(event, delta, best.epsilon)
    if simulated is None:
        return best
    return Evaluation(
        epsilon=simulated,
        certified_by=f"{certificate.own()}, Monte Carlo, confidence 1 - "
        f"{correlated_bins.FAILURE:.0e} over seeds; {best.epsilon:.3g} is proven",
        error_bound=math.inf,
    )


def epsilon(event: DpEvent, *, delta: float, adjacency: Adjacency) -> float:
    """The smallest certified epsilon at which `event` is (epsilon, delta)-DP; infinite if none is.

    >>> from userdp.accounting import events
    >>> step = events.poisson_users_gaussian(user_sampling_prob=0.01, noise_multiplier=2.0)
    >>> round(epsilon(events.repeated(step, 2000), delta=1e-6, adjacency=Adjacency.ADD_REMOVE), 3)
    1.035
    """
    return evaluate(event, delta=delta, adjacency=adjacency).epsilon


def deltas(
    event: DpEvent, *, epsilons: list[float], delta: float, adjacency: Adjacency
) -> list[float]:
    """The delta that belongs to each epsilon: the trade-off of a run that is priced at `delta`."""
    parts = added.split(event)
    if parts is not None:
        rests = [0.0] * len(epsilons)
        if parts.rest is not None:
            left = [max(one - parts.epsilon, 0.0) for one in epsilons]
            rests = deltas(parts.rest, epsilons=left, delta=delta, adjacency=adjacency)
        return [
            min(rest + parts.delta, 1.0) if one >= parts.epsilon else 1.0
            for one, rest in zip(epsilons, rests, strict=True)
        ]
    if certificate.can_price(event, adjacency):
        return certificate.deltas(event, epsilons=epsilons, adjacency=adjacency)
    return rdp_and_pld.deltas(event, epsilons=epsilons, delta=delta, adjacency=adjacency)


def calibrate(
    event_of: Callable[[float], DpEvent], *, target: float, delta: float, adjacency: Adjacency
) -> float:
    """The smallest noise multiplier (to about 0.03%) at which epsilon is at most `target`.

    `event_of` maps a noise multiplier to the event of the whole run.

    Guarantee: `epsilon(event_of(result)) <= target`, checked by evaluating it.
    """
    check_epsilon(target)
    check_delta(delta)
    noise_multiplier = search_noise(event_of, target=target, delta=delta, adjacency=adjacency)
    if noise_multiplier is None:
        # Only RDP prices the event.
        noise_multiplier = noise_by_evaluation(
            lambda noise: epsilon(event_of(noise), delta=delta, adjacency=adjacency), target
        )
        if noise_multiplier is None:
            raise _out_of_reach(event_of, target=target, delta=delta, adjacency=adjacency)
        return noise_multiplier
    aim = target
    for _ in range(8):
        reached = epsilon(event_of(noise_multiplier), delta=delta, adjacency=adjacency)
        if reached <= target:
            if isinstance(event_of(noise_multiplier), BallsInBinsBandedDpEvent):
                # The search knows the proven bound, and a simulated one may be smaller.
                return _less_noise(event_of, noise_multiplier, target, delta, adjacency)
            return noise_multiplier
        # The certificate is above the search, so aim lower by as much. The search then says how
        # much noise that takes: some parts may have a fixed noise.
        aim *= target / reached * (1 - 1e-5)
        searched = _search(event_of, target=aim, delta=delta, adjacency=adjacency)
        if searched is None:
            break
        noise_multiplier = searched
    raise _out_of_reach(event_of, target=target, delta=delta, adjacency=adjacency)


def _less_noise(
    event_of: Callable[[float], DpEvent],
    enough: float,
    target: float,
    delta: float,
    adjacency: Adjacency,
) -> float:
    """A noise multiplier that meets the target to about 1%, from one that is `enough`."""
    guess, too_little = enough, 0.0
    for _ in range(_SIMULATIONS):
        reached = epsilon(event_of(guess), delta=delta, adjacency=adjacency)
        if not reached > target:
            enough = guess
            if reached > 0.99 * target:
                break
        else:
            too_little = guess
        # Epsilon is roughly in proportion to 1 / noise.
        guess *= 1.002 * reached / target
        if not too_little < guess < enough:
            guess = math.sqrt(max(too_little, enough / 4) * enough)
    return enough


def search_noise(
    event_of: Callable[[float], DpEvent], *, target: float, delta: float, adjacency: Adjacency
) -> float | None:
    """The noise multiplier that our own search proposes; None for events that it cannot price.

    By our own proof it meets the target. `dp_accounting` has not checked it yet.
    """
    if target < SMALLEST_EPSILON:
        raise InputError(
            f"epsilon={target} is below {SMALLEST_EPSILON}, the smallest that is told apart from 0 "
            "here. Use a larger epsilon."
        )
    if steps.of(event_of(1.0), adjacency) is None:
        return None
    found = _search(event_of, target=target, delta=delta, adjacency=adjacency)
    if found is None:
        raise _out_of_reach(event_of, target=target, delta=delta, adjacency=adjacency)
    return found


def _search(
    event_of: Callable[[float], DpEvent], *, target: float, delta: float, adjacency: Adjacency
) -> float | None:
    """The noise multiplier that the search proposes; None if none is large enough."""

    def mechanism(noise_multiplier: float) -> list[steps.Step]:
        found = steps.of(event_of(noise_multiplier), adjacency)
        assert found is not None
        return found

    parts = mechanism(1.0)
    if not parts:
        # Nothing is ever released, so the least noise is enough.
        return least_noise.SMALLEST_NOISE
    sampled = any(not (isinstance(one, steps.Mixture) and one.is_gaussian) for one in parts)
    margin = MARGIN if sampled else 2 * certificate.GAUSSIAN_EXCESS
    found = least_noise.least_noise(mechanism, epsilon=target * (1 - margin), delta=delta)
    if found is None or found.noise_multiplier > LARGEST_NOISE_MULTIPLIER:
        return None
    return found.noise_multiplier


def noise_by_evaluation(epsilon_of: Callable[[float], float], target: float) -> float | None:
    """The least noise multiplier with `epsilon_of` it at most `target`, by evaluating it.

    It is at most `CALIBRATION_TOLERANCE` (relative) above the least, and never below
    `LEAST_EVALUATED_NOISE`. None if `LARGEST_NOISE_MULTIPLIER` is not enough.

    Guarantee: `epsilon_of(result) <= target`.
    """

    # Log epsilon is close to linear in log noise, so the root is found in a handful of evaluations.
    @cache
    def excess(log_noise: float) -> float:
        return math.log(max(epsilon_of(math.exp(log_noise)), 1e-300) / target)

    # The walk begins at much noise: evaluations take longer as the noise gets smaller.
    missed, met = roots.bracket(
        excess,
        math.log(8.0),
        math.log(2.0),
        least=math.log(LEAST_EVALUATED_NOISE),
        most=math.log(LARGEST_NOISE_MULTIPLIER),
    )
    if math.isinf(met):
        return None
    return math.exp(roots.root(excess, missed, met, within=CALIBRATION_TOLERANCE))


def _out_of_reach(
    event_of: Callable[[float], DpEvent], *, target: float, delta: float, adjacency: Adjacency
) -> InputError:
    # Rounding to three digits takes off at most 0.5%. The epsilon that is named must be feasible.
    feasible = 1.005 * epsilon(event_of(LARGEST_NOISE_MULTIPLIER), delta=delta, adjacency=adjacency)
    return InputError(
        f"epsilon={target} is out of reach at delta={delta}: even noise_multiplier="
        f"{LARGEST_NOISE_MULTIPLIER:.0e} gives no less than {feasible:.3g}. Use fewer steps, a "
        "smaller sampling rate, or an epsilon above that."
    )
