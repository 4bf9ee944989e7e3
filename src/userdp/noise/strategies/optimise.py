"""The banded strategy with the least error for a workload, by L-BFGS.

What is minimised is the mean over the steps of the noise's variance in the model, for columns of
norm 1: ||A C^-1||_F^2 / n (McKenna 2024, "Scaling up the banded matrix factorization mechanism").
Under (k, b)-participation with at least b steps between, sensitivity does not depend on C, so this
is the whole problem. The start is fixed and the iteration has no chance in it.

On C^T C, a banded matrix with ones on its diagonal, the problem is convex. So what L-BFGS finds on
C is not a matter of luck.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.signal import fftconvolve, lfilter

from userdp.errors import InputError
from userdp.noise.strategies import bands as forms
from userdp.noise.strategies.bands import Bands
from userdp.noise.strategies.error import last_row, squared_inverse
from userdp.noise.strategies.square_root import square_root
from userdp.noise.strategies.workload import Workload

Floats = NDArray[np.float64]
Objective = Callable[[Floats], tuple[float, Floats]]

# The search ends if the error falls by a smaller share than this in an iteration.
TOLERANCE = 1e-9
ITERATIONS = 1000
FINER = 100.0
LARGEST = 1e9


def mean_error(workload: Workload, strategy: Bands) -> float:
    """||A C^-1||_F^2 / n: the variance in the model for z of variance 1, averaged over the steps.

    >>> round(mean_error(Workload(steps=9), forms.identity(9)), 6)
    5.0
    """
    value, _ = squared_inverse(_through(workload, strategy.columns()))
    return value / workload.steps


def final_error(workload: Workload, strategy: Bands) -> float:
    """The variance in the last model for z of variance 1."""
    return float((last_row(_through(workload, strategy.columns())) ** 2).sum())


@functools.lru_cache(maxsize=4)
def optimised(workload: Workload, bands: int) -> Bands:
    """The best strategy with `bands` bands, each column for itself."""
    start = optimised_toeplitz(workload, bands).columns()
    if _check(workload, bands) == 1:
        return forms.identity(workload.steps)
    shape = start.shape
    inside = np.arange(shape[0])[:, None] + np.arange(bands) < shape[0]

    def objective(flat: Floats) -> tuple[float, Floats]:
        free = np.where(inside, flat.reshape(shape), 0.0)
        norms = np.linalg.norm(free, axis=1, keepdims=True)
        columns = free / norms
        value, by_columns = _value(workload, columns)
        # The length of a column does not count.
        along = (by_columns * columns).sum(axis=1, keepdims=True)
        return value, np.where(inside, (by_columns - along * columns) / norms, 0.0).ravel()

    start /= np.linalg.norm(start, axis=1, keepdims=True)
    return forms.from_columns(_least(objective, start.ravel()).reshape(shape))


@functools.lru_cache(maxsize=16)
def optimised_toeplitz(workload: Workload, bands: int) -> Bands:
    """The best strategy whose diagonals are constant."""
    if _check(workload, bands) == 1:
        return forms.identity(workload.steps)
    start = square_root(workload, bands)
    of_row = _toeplitz_value if workload.is_the_same_at_every_step else _tied_value

    def objective(row: Floats) -> tuple[float, Floats]:
        squared = float(row @ row)
        value, by_row = of_row(workload, row)
        # Scaling C down to norm 1 scales the noise up.
        return value * squared, by_row * squared + 2 * value * row

    return forms.toeplitz(_least(objective, start), workload.steps)


def _check(workload: Workload, bands: int) -> int:
    if not 1 <= bands <= workload.steps:
        raise InputError(f"bands={bands}: use 1 to {workload.steps}, the number of steps.")
    return bands


def _least(objective: Objective, start: Floats) -> Floats:
    # Scaled to 1 at the start, so that tolerances mean the same for every workload. The first trial
    # of the search has length 1, which would be too far: there noise may grow without bound.
    scale = objective(start)[0]

    def scaled(at: Floats) -> tuple[float, Floats]:
        with np.errstate(over="ignore", invalid="ignore"):
            value, gradient = objective(at / FINER)
        if not (np.isfinite(gradient).all() and value < LARGEST * scale):
            # Uphill, back to where the search began.
            away = at - start * FINER
            return LARGEST, LARGEST * away / float(away @ away)
        return value / scale, gradient / (scale * FINER)

    options = {"maxiter": ITERATIONS, "maxcor": 10, "ftol": TOLERANCE, "gtol": 0.0}
    found: Any = minimize(scaled, start * FINER, jac=True, method="L-BFGS-B", options=options)
    # A search that went wrong must not leave a worse strategy than it began with.
    return found.x / FINER if found.fun <= 1 else start


def _through(workload: Workload, columns: Floats) -> Floats:
    """D = C A^-1 by columns, from C by columns."""
    inverse = workload.inverse_columns()
    n, width = columns.shape
    wide = np.zeros((n, width + inverse.shape[1] - 1))
    for j in range(inverse.shape[1]):
        # Column s of D has A^-1[s + j, s] times column s + j of C, which begins j rows lower.
        wide[: n - j, j : j + width] += inverse[: n - j, j, None] * columns[j:]
    return wide


def _value(workload: Workload, columns: Floats) -> tuple[float, Floats]:
    """||A C^-1||_F^2 and its gradient by C's columns."""
    value, by_wide = squared_inverse(_through(workload, columns))
    inverse = workload.inverse_columns()
    n, width = columns.shape
    gradient = np.zeros_like(columns)
    for j in range(inverse.shape[1]):
        gradient[j:] += inverse[: n - j, j, None] * by_wide[: n - j, j : j + width]
    return value, gradient


def _tied_value(workload: Workload, row: Floats) -> tuple[float, Floats]:
    """`_value` for a Toeplitz C, with the gradient in its coefficients."""
    n = workload.steps
    inside = np.arange(n)[:, None] + np.arange(len(row)) < n
    value, gradient = _value(workload, np.where(inside, row, 0.0))
    return value, np.where(inside, gradient, 0.0).sum(axis=0)


def _toeplitz_value(workload: Workload, row: Floats) -> tuple[float, Floats]:
    """`_tied_value` where A is Toeplitz, too: a product of power series.

    With v(x) = A(x) / C(x), the value is the sum of (n - s) v_s^2, and dv = -v (dC / C).
    """
    n = workload.steps
    impulse = np.zeros(n)
    impulse[0] = 1.0
    summed = _divided(impulse, np.array([1.0, workload.decay - 1]))
    response = _divided(_divided(summed, np.array([1.0, -workload.momentum])), row)
    weights = np.arange(n, 0, -1.0)
    # The search may try a C whose inverse grows without bound. Its value is infinite, or no number,
    # and the search turns back.
    with np.errstate(over="ignore", invalid="ignore"):
        value = float(weights @ response**2)
        moved = _divided(response, row)
        # Entry j is the sum over s of weight_s v_s (v / C)_(s - j).
        correlated = fftconvolve(weights * response, moved[::-1])[n - 1 : n - 1 + len(row)]
    return value, -2 * correlated


def _divided(series: Floats, by: Floats) -> Floats:
    """The quotient of two power series."""
    return np.asarray(lfilter([1.0], by, series))
