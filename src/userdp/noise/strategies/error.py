"""The error of a banded strategy and its gradient, in n b^2 operations and n b numbers.

The noise on the models of all steps is A C^-1 z, so its mean square over the n steps is
||A C^-1||_F^2 / n. A C^-1 is the inverse of D = C A^-1. A^-1 has two or three bands (`workload`),
so D has few bands more than C. Then ||D^-1||_F^2 is the trace of P = (D D^T)^-1, the inverse of a
banded matrix whose Cholesky factor is known. From D^T P = D^-1, which is lower triangular, P's band
follows row by row from the bottom (the recursion of Takahashi et al. 1973):

    P[i, i+1:] = -Q l,   P[i, i] = 1 / D[i, i]^2 + l^T Q l,   l = D[i+1:, i] / D[i, i],

where Q is the block of P just below and to the right. The gradient is the same recursion backwards.
McKenna 2024 computes the same error in n^2 b operations, by solving with C for every column.

D is given by columns: `columns[i, j]` = D[i + j, i].
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from userdp.noise.strategies.compiled import compiled

Floats = NDArray[np.float64]


def squared_inverse(columns: Floats) -> tuple[float, Floats]:
    """||D^-1||_F^2 and its gradient by D's entries.

    >>> value, gradient = squared_inverse(np.array([[2.0, 1.0], [1.0, 0.0]]))
    >>> value, gradient.tolist()
    (1.5, [[-0.5, 0.5], [-2.5, 0.0]])
    """
    band = np.zeros_like(columns)
    _inverse_band(columns, band)
    gradient = np.zeros_like(columns)
    _backwards(columns, band, gradient)
    return float(band[:, 0].sum()), gradient


def last_row(columns: Floats) -> Floats:
    """The last row of D^-1: how each step's z enters the last model."""
    found = np.zeros(len(columns))
    _last_row(columns, found)
    return found


@compiled
def _inverse_band(columns: Floats, band: Floats) -> None:
    # band[i, k] becomes P[i, i + k].
    n, width = columns.shape
    scaled = np.zeros(width)
    product = np.zeros(width)
    for back in range(n):
        i = n - 1 - back
        below = min(width - 1, back)
        diagonal = columns[i, 0]
        for a in range(below):
            scaled[a] = columns[i, 1 + a] / diagonal
            product[a] = 0.0
        for a in range(below):
            own = scaled[a]
            total = band[i + 1 + a, 0] * own
            for k in range(1, below - a):
                entry = band[i + 1 + a, k]
                total += entry * scaled[a + k]
                product[a + k] += entry * own
            product[a] += total
        corner = 1.0 / (diagonal * diagonal)
        for a in range(below):
            corner += scaled[a] * product[a]
            band[i, 1 + a] = -product[a]
        band[i, 0] = corner


@compiled
def _backwards(columns: Floats, band: Floats, gradient: Floats) -> None:
    n, width = columns.shape
    # weights[i, k] is the derivative of the trace by P[i, i + k] as the rows above i use it.
    weights = np.zeros((n, width))
    weights[:, 0] = 1.0
    scaled = np.zeros(width)
    by_product = np.zeros(width)
    by_scaled = np.zeros(width)
    for i in range(n):
        below = min(width - 1, n - 1 - i)
        diagonal, corner = columns[i, 0], weights[i, 0]
        for a in range(below):
            scaled[a] = columns[i, 1 + a] / diagonal
            by_product[a] = corner * scaled[a] - weights[i, 1 + a]
            by_scaled[a] = -corner * band[i, 1 + a]
        for a in range(below):
            own, by_own = scaled[a], by_product[a]
            total = band[i + 1 + a, 0] * by_own
            weights[i + 1 + a, 0] += by_own * own
            for k in range(1, below - a):
                entry = band[i + 1 + a, k]
                total += entry * by_product[a + k]
                by_scaled[a + k] += entry * by_own
                weights[i + 1 + a, k] += by_own * scaled[a + k] + by_product[a + k] * own
            by_scaled[a] += total
        by_diagonal = -2.0 * corner / (diagonal * diagonal * diagonal)
        for a in range(below):
            by_diagonal -= by_scaled[a] * scaled[a] / diagonal
            gradient[i, 1 + a] = by_scaled[a] / diagonal
        gradient[i, 0] = by_diagonal


@compiled
def _last_row(columns: Floats, found: Floats) -> None:
    # D^T x = e_n, from the bottom.
    n, width = columns.shape
    for back in range(n):
        i = n - 1 - back
        total = 1.0 if back == 0 else 0.0
        for j in range(1, min(width - 1, back) + 1):
            total -= columns[i, j] * found[i + j]
        found[i] = total / columns[i, 0]
