"""Closed forms: the square root of the workload, or its inverse, cut to a few bands.

For A = prefix sums, A(x) = 1 / (1 - x) as a power series, and C(x) = (1 - x)^(-1/2) is the
Toeplitz C with C^2 = A. Cut to b terms it is the banded square root (Kalinin and Lampert 2024). If
instead C^-1(x) = (1 - x)^(1/2) is cut, the inverse is banded (Kalinin, McKenna, Pillutla and
Lampert 2025, "Back to square roots"). With momentum mu and decay d, 1 / A(x) = (1 - (1 - d) x)
(1 - mu x), and both factors have such series.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from userdp.noise.strategies.workload import Workload

Floats = NDArray[np.float64]


def power_series(rate: float, exponent: float, terms: int) -> Floats:
    """The first coefficients of (1 - `rate` x)^`exponent`.

    >>> power_series(1.0, -0.5, 4).tolist()
    [1.0, 0.5, 0.375, 0.3125]
    """
    found = [1.0]
    for k in range(1, terms):
        found.append(found[-1] * rate * (k - 1 - exponent) / k)
    return np.array(found)


def square_root(workload: Workload, bands: int) -> Floats:
    """The first coefficients of the square root of A, without a schedule of the rate."""
    return _of_both(workload, -0.5, bands)


def inverse_square_root(workload: Workload, bands: int) -> Floats:
    """The first coefficients of its inverse."""
    return _of_both(workload, 0.5, bands)


def _of_both(workload: Workload, exponent: float, terms: int) -> Floats:
    first = power_series(1 - workload.decay, exponent, terms)
    second = power_series(workload.momentum, exponent, terms)
    return np.array([float(first[: k + 1] @ second[k::-1]) for k in range(terms)])
