"""Where a function changes its sign, with the result on the safe side.

A noise multiplier that is a little too small breaks a promise, and one that is a little too large
does not. So every function here takes an `excess`, which is positive where a target is missed, and
returns a point that was evaluated and does not miss it.

`root` is Brent's method (scipy). `near` is written by hand: where each evaluation is expensive and
a good guess is known, it needs two or three evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from userdp.accounting import special

Excess = Callable[[float], float]

# Excesses are cut to this size: with an infinite value Brent's method would creep.
_FAR = 100.0


def bracket(
    excess: Excess,
    start: float,
    step: float,
    *,
    growth: float = 1.0,
    least: float = -math.inf,
    most: float = math.inf,
) -> tuple[float, float]:
    """Two points, the target missed at the first and met at the second, for a falling `excess`.

    The walk begins at `start`, and each step is `growth` times as long as the one before. If the
    target is met even at `least`, both points are `least`. If it is missed even at `most`, both
    points are infinite.

    >>> bracket(lambda x: 5 - x, 1.0, 1.0, growth=2.0)
    (4.0, 8.0)
    """
    at = start
    if excess(at) > 0:
        while at < most:
            before, at = at, min(at + step, most)
            if excess(at) <= 0:
                return before, at
            step *= growth
        return math.inf, math.inf
    while at > least:
        before, at = at, max(at - step, least)
        if excess(at) > 0:
            return at, before
        step *= growth
    return least, least


def root(
    excess: Excess, missed: float, met: float, *, within: float = 0.0, relative: float = 0.0
) -> float:
    """The point next to the root at which `excess` is at most 0, up to the tolerance.

    The target is missed at `missed` and met at `met`, on whichever side. If it is met at both, the
    result is `missed`.

    Guarantee: `excess(result) <= 0`.

    >>> round(root(lambda x: 2 - x * x, 0.0, 2.0, within=1e-9), 6)
    1.414214
    """
    excess = cache(excess)
    if excess(missed) <= 0:
        return missed
    assert excess(met) <= 0, "no point is known that meets the target"

    def near_zero(x: float) -> float:
        return min(max(excess(x), -_FAR), _FAR)

    found = special.brent(near_zero, missed, met, within=within / 2, relative=relative / 2)
    step = math.copysign((within + relative * abs(found)) / 2, met - missed)
    while excess(found) > 0:
        found += step
        step *= 2
        if (found - met) * (met - missed) >= 0:
            return met
    return found


def near(
    excess: Excess, guess: float, slope: float, *, within: float, rise: float
) -> tuple[float, float]:
    """The least point at which a falling `excess` is at most 0, and the slope there.

    These are secant steps from `guess`, kept between the points that are known to miss and to meet
    the target. Each step aims `rise` tolerances above the root, so that it rarely has to be
    repeated.
    """
    at, low, high = guess, -math.inf, math.inf
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
        if value <= 0 and (-value / -slope < within or high - low < within):
            return at, slope
        if high - low < within:
            return high, slope
        step = at - value / slope + rise * within
        step = min(max(step, at - 0.5), at + 0.5)
        if math.isfinite(low) and math.isfinite(high) and not low < step < high:
            step = (low + high) / 2
        elif high == math.inf:
            step = max(step, low + within / 2)
        at = step
    return high, slope
