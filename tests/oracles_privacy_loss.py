"""Delta and epsilon of many steps by other means than the code under test.

One step's loss is integrated on evenly spaced outputs, put on a grid such that its mean is kept,
and composed by one Fourier transform in extended precision (64 bits of mantissa), without tilting.
An estimate, no bound: its grid errs by about 1e-4 of epsilon, and its rounding by about
steps * 1e-19, which is small beside every delta it is used for.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import fft

needs_extended_precision = pytest.mark.skipif(
    np.finfo(np.longdouble).eps > 2e-19, reason="no extended precision on this processor"
)


def log_density(x: np.ndarray, shifts, weights, noise: float) -> np.ndarray:
    """log of the mixture's density, up to the constant of the noise."""
    parts = [
        np.log(weight) - (x - shift) ** 2 / (2 * noise**2)
        for shift, weight in zip(shifts, weights, strict=True)
    ]
    return np.logaddexp.reduce(parts)


def composed_delta(
    epsilon: float, one, other, noise: float, steps: int, *, spacing: float, length: int = 1 << 20
) -> float:
    """The hockey-stick divergence of `steps` steps; `one`, `other` are (shifts, weights)."""
    low = min(*one[0], *other[0]) - 14 * noise
    high = max(*one[0], *other[0]) + 14 * noise
    x = np.linspace(low, high, 100_001)
    first, second = log_density(x, *one, noise), log_density(x, *other, noise)
    mass = np.exp(first.astype(np.longdouble))
    mass /= mass.sum()
    place = (first - second) / spacing
    below = np.floor(place)
    share = (place - below).astype(np.longdouble)
    index = below.astype(np.int64)
    grid = np.zeros(length, dtype=np.longdouble)
    np.add.at(grid, index % length, mass * (1 - share))
    np.add.at(grid, (index + 1) % length, mass * share)
    whole = fft.irfft(fft.rfft(grid) ** steps, length)
    # The sum is wanted from half of the window below epsilon on; nothing lies far from there.
    start = int(epsilon / spacing) - length // 2
    loss = spacing * (start + (np.arange(length) - start) % length)
    over = loss > epsilon
    return float((whole[over] * -np.expm1(epsilon - loss[over])).sum())


def user_joins(rate: float):
    """The two neighbours of one sampled user, there and not there."""
    return ([0.0, 1.0], [1 - rate, rate]), ([0.0], [1.0])


def user_replaced(rate: float):
    """The two neighbours of one sampled user, and of another one who pulls the other way."""
    return ([0.0, 1.0], [1 - rate, rate]), ([0.0, -1.0], [1 - rate, rate])
