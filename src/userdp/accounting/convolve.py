"""The sum of two laws on a grid, each sum split between its two neighbours: a compiled loop.

`averages` says why this is an upper bound.
"""

from __future__ import annotations

import numpy as np

from userdp.accounting.special import Floats
from userdp.compiled import compiled


def spread_sum(
    values: Floats,
    masses: Floats,
    other_values: Floats,
    other_masses: Floats,
    grid: Floats,
    *,
    twice: bool,
) -> tuple[Floats, float]:
    """The masses at 0 and at the points of `grid`, and the mean that was sent to infinity.

    All values are increasing and start at 0 or above; `grid` is positive. `twice` says that both
    laws are the same, so that each pair of different values needs to be looked at only once.
    """
    result = np.zeros(len(grid) + 1)
    points = np.append(0.0, grid)
    beyond = _spread_sum(values, masses, other_values, other_masses, points, result, twice)
    return result, beyond


@compiled
def _spread_sum(
    values: Floats,
    masses: Floats,
    other_values: Floats,
    other_masses: Floats,
    grid: Floats,
    result: Floats,
    twice: bool,
) -> float:
    points = len(grid)
    beyond = 0.0
    for first in range(len(values)):
        value, mass = values[first], masses[first]
        if mass == 0.0:
            continue
        # The sums increase with the second value, so their place on the grid only moves up. `at` is
        # the point above the sum, and `points` means that the sum is above the whole grid.
        at = 1
        begin = first if twice else 0
        start = value + other_values[begin]
        if start > grid[1]:
            at = int(np.searchsorted(grid, start))
        low = high = excess = 0.0
        for second in range(begin, len(other_values)):
            share = other_masses[second]
            if twice and second > first:
                share *= 2.0
            added = value + other_values[second]
            if at < points and added > grid[at]:
                result[at - 1] += low * mass
                result[at] += high * mass
                low = high = 0.0
                while at < points and added > grid[at]:
                    at += 1
            if at == points:
                low += share
                excess += share * (added - grid[at - 1])
            else:
                part = (added - grid[at - 1]) / (grid[at] - grid[at - 1])
                high += share * part
                low += share * (1.0 - part)
        result[at - 1] += low * mass
        if at < points:
            result[at] += high * mass
        beyond += excess * mass
    return beyond
