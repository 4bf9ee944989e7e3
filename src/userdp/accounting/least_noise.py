"""The least noise multiplier that meets a target epsilon, by our own bound.

The search first solves the saddle-point approximation, which costs no FFT, and then corrects it by
a few evaluations of the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from userdp.accounting import gaussian, mild, search
from userdp.accounting.pair import Direction
from userdp.accounting.prepared import directions, prepare
from userdp.accounting.search import COARSE_TOLERANCE, TOLERANCE
from userdp.accounting.steps import Mixture, Step, chance_of_moving

# Calibrated noise is at most this much (relative) above the least that meets the target.
NOISE_TOLERANCE = 1e-5

LARGEST_NOISE = 1e9
SMALLEST_NOISE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Found:
    """A noise multiplier, and how many evaluations of the bound it took."""

    noise_multiplier: float
    evaluations: int


def least_noise(
    mechanism_of: Callable[[float], Sequence[Step]],
    *,
    epsilon: float,
    delta: float,
    tolerance: float = TOLERANCE,
) -> Found | None:
    """The least noise multiplier (to 1e-5, above) whose delta bound at `epsilon` meets `delta`.

    None if no noise up to `LARGEST_NOISE` does.
    """
    target = math.log(delta)
    tilts = dict.fromkeys(Direction, 1.0)

    def estimate(log_noise: float) -> float:
        prepared = prepare(mechanism_of(math.exp(log_noise)), delta)
        values: list[float] = []
        for way in directions(prepared):
            tilts[way], value = search.saddle(prepared, way, epsilon, tilts[way])
            values.append(value)
        return max(values) - target

    evaluations = 0

    def bound(log_noise: float, tolerance: float, ways: Sequence[Direction]) -> float:
        nonlocal evaluations
        evaluations += 1
        prepared = prepare(mechanism_of(math.exp(log_noise)), delta)
        result = max(search.delta_at(prepared, way, epsilon, tolerance, delta) for way in ways)
        return math.log(max(result, 1e-300)) - target

    exact = _gaussian_noise(mechanism_of, epsilon, delta)
    if exact is not None:
        return exact if exact.noise_multiplier <= LARGEST_NOISE else None
    if chance_of_moving(mechanism_of(1.0)) <= delta:
        # Delta covers the chance that the user is ever there: any noise will do.
        return Found(noise_multiplier=SMALLEST_NOISE, evaluations=0)
    closed = mild.least_noise(mechanism_of, epsilon=epsilon, delta=delta)
    if closed is not None:
        return Found(noise_multiplier=closed, evaluations=1) if closed <= LARGEST_NOISE else None
    start = _bracketed(estimate, 0.0)
    if start is None:
        return None
    log_noise, slope = start
    if log_noise <= math.log(SMALLEST_NOISE):
        return Found(noise_multiplier=SMALLEST_NOISE, evaluations=0)
    ways = directions(prepare(mechanism_of(math.exp(log_noise)), delta))
    log_noise, slope = _secant(
        lambda at: bound(at, COARSE_TOLERANCE, ways), log_noise, slope, 2e-3, rise=0.0
    )
    # One direction decides: only it is searched, and the other one is checked at the end.
    worse = max(ways, key=lambda way: bound(log_noise, COARSE_TOLERANCE, [way]))
    log_noise, slope = _secant(
        lambda at: bound(at, tolerance, [worse]), log_noise, slope, NOISE_TOLERANCE, rise=0.3
    )
    if any(bound(log_noise, tolerance, [way]) > 0 for way in ways if way is not worse):
        log_noise, _ = _secant(
            lambda at: bound(at, tolerance, ways), log_noise, slope, NOISE_TOLERANCE, rise=0.3
        )
    return Found(noise_multiplier=math.exp(log_noise), evaluations=evaluations)


def _gaussian_noise(
    mechanism_of: Callable[[float], Sequence[Step]], epsilon: float, delta: float
) -> Found | None:
    """The exact answer where no step samples and every noise is fixed or the multiplier's multiple.

    Infinite where the fixed ones alone cost more than epsilon.
    """
    fixed = scaled = 0.0
    for one, two in zip(mechanism_of(1.0), mechanism_of(2.0), strict=True):
        if not (isinstance(one, Mixture) and isinstance(two, Mixture) and one.is_gaussian):
            return None
        square = one.count * (float(one.shifts[0]) / one.noise) ** 2
        if two.noise == one.noise:
            fixed += square
        elif two.noise == 2 * one.noise:
            scaled += square
        else:
            return None
    left = gaussian.sensitivity(epsilon, delta) ** 2 - fixed
    return Found(noise_multiplier=math.sqrt(scaled / left) if left > 0 else math.inf, evaluations=1)


def _bracketed(excess: Callable[[float], float], start: float) -> tuple[float, float] | None:
    """A root (to 1%) of a decreasing function of the log noise, and the slope there."""
    at = start
    value = excess(at)
    step = math.log(2.0) if value > 0 else -math.log(2.0)
    before, before_value = at, value
    while (value > 0) == (step > 0):
        if not math.log(SMALLEST_NOISE) < at < math.log(LARGEST_NOISE):
            return None if step > 0 else (at, -1.0)
        before, before_value = at, value
        at += step
        value = excess(at)
        step *= 1.5
    low, low_value = (before, before_value) if before < at else (at, value)
    high, high_value = (at, value) if before < at else (before, before_value)
    for _ in range(40):
        if high - low < 0.01:
            break
        slope = (high_value - low_value) / (high - low)
        guess = low - low_value / slope if math.isfinite(slope) and slope < 0 else (low + high) / 2
        margin = 0.05 * (high - low)
        guess = min(max(guess, low + margin), high - margin)
        value = excess(guess)
        if value > 0:
            low, low_value = guess, value
        else:
            high, high_value = guess, value
    slope = (high_value - low_value) / (high - low)
    return low - low_value / slope, slope


def _secant(
    excess: Callable[[float], float], at: float, slope: float, tolerance: float, *, rise: float
) -> tuple[float, float]:
    """The root of a decreasing function from above, to `tolerance`, and the slope there."""
    low, high = -math.inf, math.inf
    known: list[tuple[float, float]] = []
    for _ in range(60):
        value = excess(at)
        known.append((at, value))
        if value > 0:
            low = max(low, at)
        else:
            high = min(high, at)
        if len(known) > 1:
            (first, first_value), (second, second_value) = known[-2:]
            if second != first:
                between = (second_value - first_value) / (second - first)
                slope = between if between < -1e-6 else slope
        if value <= 0 and (-value / -slope < tolerance or high - low < tolerance):
            return at, slope
        if high - low < tolerance:
            return high, slope
        step = at - value / slope + rise * tolerance
        step = min(max(step, at - 0.5), at + 0.5)
        if math.isfinite(low) and math.isfinite(high) and not low < step < high:
            step = (low + high) / 2
        elif high == math.inf:
            step = max(step, low + tolerance / 2)
        at = step
    return high, slope
