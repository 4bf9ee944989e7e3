"""How far one user moves C G, if it takes part in at most k steps that are at least b apart.

G has a row for each step. A user changes at most k of its rows, each by a vector of norm at most 1.
What counts is the largest Frobenius norm of C times such a change. The noise is Gaussian and C is
lower triangular, so this also covers gradients that depend on what was released before (Denisov,
McMahan, Rush, Smith and Thakurta 2022, Thm. 2.1).

*Banded.* If C has at most b bands, columns that are b apart have no row in common. So the change
has norm at most sqrt(k) times the longest column (Choquette-Choo et al. 2024, Thm. 2).

*Toeplitz.* If the diagonals c_0 >= c_1 >= ... >= 0, the largest change is that of equal vectors in
the steps 0, b, 2b, ... (Kalinin and Lampert 2024, Thm. 2). Rounding, or a strategy of another
kind, may break the order. Then the decreasing sequence above |c_0|, |c_1|, ... is used in place of
c: it makes every product of two columns larger, so the result is never too small.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from userdp.errors import UnaccountedPlanError

Floats = NDArray[np.float64]


def most_participations(steps: int, *, separation: int, participations: int) -> int:
    """How often a user can take part within so many steps."""
    return min(participations, -(-steps // separation))


def check_separation(bands: int, separation: int) -> None:
    """Refuse steps of a user so close together that they share the rows of a banded strategy."""
    if separation < bands:
        raise UnaccountedPlanError(
            f"bands={bands} with only {separation} steps between two of a user's: contributions "
            "would add up in the same rows, which is not what is priced. Use at most "
            f"bands={separation}, or a larger separation."
        )


def toeplitz_sensitivity(coefficients: Floats, *, separation: int, participations: int) -> float:
    """The sensitivity of the Toeplitz strategy with this first column, rounded up by 1e-6 at most.

    >>> toeplitz_sensitivity(np.array([1.0, 0.5, 0.25]), separation=2, participations=2)
    1.677051
    """
    exact = unrounded(coefficients, separation=separation, participations=participations)
    # Rounded up, so that machines that differ in the last bit agree on a price.
    return math.ceil(exact * 1e6 + 1e-6) / 1e6


def unrounded(coefficients: Floats, *, separation: int, participations: int) -> float:
    """The sensitivity before it is rounded up."""
    above = np.maximum.accumulate(np.abs(coefficients)[::-1])[::-1]
    n = len(above)
    total = np.zeros(n)
    k = most_participations(n, separation=separation, participations=participations)
    for start in range(0, k * separation, separation):
        total[start:] += above[: n - start]
    return float(np.linalg.norm(total))
