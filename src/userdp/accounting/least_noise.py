"""The least noise multiplier that meets a target epsilon, by our own bound.

The search first solves the saddle-point approximation, which needs no FFT. Then a few evaluations
of the bound correct it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from userdp.accounting import gaussian, mild, roots, search
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
    """The least noise multiplier whose delta bound at `epsilon` is at most `delta`.

    It is at most 1e-5 (relative) above the least one. None if `LARGEST_NOISE` is not enough.
    """
    target = math.log(delta)
    tilts = dict.fromkeys(Direction, 1.0)

    @cache
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
        # Delta covers the chance that the user is ever there, so any noise is enough.
        return Found(noise_multiplier=SMALLEST_NOISE, evaluations=0)
    closed = mild.least_noise(mechanism_of, epsilon=epsilon, delta=delta)
    if closed is not None:
        return Found(noise_multiplier=closed, evaluations=1) if closed <= LARGEST_NOISE else None
    start = _estimated(estimate)
    if start is None:
        return None
    log_noise, slope = start
    if log_noise <= math.log(SMALLEST_NOISE):
        return Found(noise_multiplier=SMALLEST_NOISE, evaluations=0)
    ways = directions(prepare(mechanism_of(math.exp(log_noise)), delta))
    log_noise, slope = roots.near(
        lambda at: bound(at, COARSE_TOLERANCE, ways), log_noise, slope, within=2e-3, rise=0.0
    )
    # One direction decides. Only that one is searched, and the other one is checked at the end.
    worse = max(ways, key=lambda way: bound(log_noise, COARSE_TOLERANCE, [way]))
    log_noise, slope = roots.near(
        lambda at: bound(at, tolerance, [worse]), log_noise, slope, within=NOISE_TOLERANCE, rise=0.3
    )
    if any(bound(log_noise, tolerance, [way]) > 0 for way in ways if way is not worse):
        log_noise, _ = roots.near(
            lambda at: bound(at, tolerance, ways),
            log_noise,
            slope,
            within=NOISE_TOLERANCE,
            rise=0.3,
        )
    return Found(noise_multiplier=math.exp(log_noise), evaluations=evaluations)


def _gaussian_noise(
    mechanism_of: Callable[[float], Sequence[Step]], epsilon: float, delta: float
) -> Found | None:
    """The exact answer where no step samples, and each noise is fixed or a multiple of the result.

    It is infinite where the steps of fixed noise alone cost more than epsilon.
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


def _estimated(excess: roots.Excess) -> tuple[float, float] | None:
    """The log noise (to 1%) at which the estimate meets the target, and the slope there.

    The log of `SMALLEST_NOISE` if so little will do; None if `LARGEST_NOISE` does not.
    """
    least, most = math.log(SMALLEST_NOISE), math.log(LARGEST_NOISE)
    missed, met = roots.bracket(excess, 0.0, math.log(2.0), growth=1.5, least=least, most=most)
    if missed == met:
        return (least, -1.0) if met == least else None
    at = roots.root(excess, missed, met, within=0.01)
    return at, (excess(at + 0.01) - excess(at)) / 0.01
