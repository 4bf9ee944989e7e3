"""A strategy as plain arrays, their digest, and its inverse in full."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular, toeplitz

from userdp.noise.strategies.bands import Bands
from userdp.noise.strategies.unbanded import Buffered, InverseBands

Floats = NDArray[np.float64]


def numbers_of(strategy: Bands | InverseBands | Buffered) -> Floats:
    """What C is made from, as one table."""
    if isinstance(strategy, Bands):
        return strategy.coefficients
    if isinstance(strategy, InverseBands):
        return strategy.noising[None]
    return np.array([[strategy.diagonal, *strategy.decays, *strategy.scales]])


def from_numbers(
    kind: type[Bands] | type[InverseBands] | type[Buffered], numbers: Floats, steps: int
) -> Bands | InverseBands | Buffered:
    """The strategy of this kind; its columns are checked."""
    if kind is Bands:
        return Bands(steps=steps, coefficients=numbers)
    if kind is InverseBands:
        return InverseBands(steps=steps, noising=numbers[0])
    buffers = (numbers.shape[1] - 1) // 2
    decays, scales = numbers[0, 1 : buffers + 1], numbers[0, buffers + 1 :]
    return Buffered(
        steps=steps,
        diagonal=float(numbers[0, 0]),
        decays=tuple(decays.tolist()),
        scales=tuple(scales.tolist()),
    )


def digest_of(strategy: Bands | InverseBands | Buffered) -> str:
    """64 hexadecimal digits that are the same for the same C, bit for bit."""
    numbers = np.ascontiguousarray(numbers_of(strategy))
    name = f"{type(strategy).__name__} {strategy.steps} {numbers.shape}".encode()
    return hashlib.sha256(name + numbers.astype("<f8").tobytes()).hexdigest()


def inverse_of(strategy: Bands | InverseBands | Buffered, steps: int) -> Floats:
    """The first rows and columns of C^-1, for a few steps."""
    if isinstance(strategy, Bands):
        first = strategy.columns()[:steps]
        matrix = np.zeros((steps, steps))
        for j in range(min(strategy.bands, steps)):
            matrix += np.diag(first[: steps - j, j], -j)
    else:
        matrix = np.tril(toeplitz(strategy.coefficients()[:steps]))
    return np.asarray(solve_triangular(matrix, np.eye(steps), lower=True))
