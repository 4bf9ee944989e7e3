"""Strategies that have no bands but a short recursion: Toeplitz matrices C by two ways of memory.

`InverseBands`: C^-1 has few bands, so the noise of a step is a sum of the last few z. These can be
drawn again from their streams, and nothing is stored.

`Buffered`: C's coefficients are a sum of few decaying exponentials, so the memory of all past steps
is one vector for each (buffered linear Toeplitz; Dvijotham, McMahan, Pillutla, Steinke and Thakurta
2024; McMahan, Xu and Zhang 2024).

In both, every column of C is a shifted and cut copy of the first, which has norm at most 1. The
columns of distant steps overlap. So sensitivity is not that of one step (`sensitivity`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from userdp.errors import InputError
from userdp.noise.strategies.bands import ROOM

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class InverseBands:
    """C^-1 by its diagonals: the noise of step t is sum_j `noising`[j] z_(t-j)."""

    steps: int
    noising: Floats

    def __post_init__(self) -> None:
        if not (np.isfinite(self.noising).all() and self.noising[0] > 0):
            raise InputError("C^-1 needs finite diagonals, and a positive first one.")
        check_first_column(self.coefficients())

    def coefficients(self) -> Floats:
        """The first column of C."""
        impulse = np.zeros(self.steps)
        impulse[0] = 1.0
        return np.asarray(lfilter([1.0], self.noising, impulse))


@dataclass(frozen=True, kw_only=True, eq=False)
class Buffered:
    """C with c_0 = `diagonal` and c_k = c_0 sum_i `scales`[i] `decays`[i]^(k-1)."""

    steps: int
    diagonal: float
    decays: tuple[float, ...]
    scales: tuple[float, ...]

    def __post_init__(self) -> None:
        good = all(0 <= decay < 1 for decay in self.decays) and all(s >= 0 for s in self.scales)
        if not (good and self.diagonal > 0 and len(self.decays) == len(self.scales)):
            raise InputError("buffers need decays from 0 up to below 1, and scales of 0 or more.")
        check_first_column(self.coefficients())

    def coefficients(self) -> Floats:
        """The first column of C."""
        return self.diagonal * buffered_series(self.decays, self.scales, self.steps)


def inverse_bands(noising: Floats, steps: int) -> InverseBands:
    """The strategy with these diagonals of C^-1, scaled so that C's first column has norm 1."""
    impulse = np.zeros(steps)
    impulse[0] = 1.0
    norm = float(np.linalg.norm(lfilter([1.0], noising, impulse)))
    rounded = (noising * (norm * (1 + ROOM))).astype(np.float32).astype(np.float64)
    return InverseBands(steps=steps, noising=rounded)


def buffered(decays: Floats, scales: Floats, steps: int) -> Buffered:
    """The strategy with these buffers, scaled so that C's first column has norm 1."""
    norm = float(np.linalg.norm(buffered_series(tuple(decays), tuple(scales), steps)))
    return Buffered(
        steps=steps,
        diagonal=(1 - ROOM) / norm,
        decays=tuple(float(decay) for decay in decays),
        scales=tuple(float(scale) for scale in scales),
    )


def buffered_series(decays: tuple[float, ...], scales: tuple[float, ...], steps: int) -> Floats:
    """1, and then the sums of the scaled powers of the decays.

    >>> buffered_series((0.5,), (0.8,), 4).tolist()
    [1.0, 0.8, 0.4, 0.2]
    """
    powers = np.arange(steps - 1)
    terms = [scale * decay**powers for decay, scale in zip(decays, scales, strict=True)]
    return np.concatenate([[1.0], np.sum(terms, axis=0)]) if terms else np.eye(1, steps)[0]


def check_first_column(coefficients: Floats) -> None:
    """Refuse a C in which one step's contribution can be longer than 1."""
    norm = float(np.linalg.norm(coefficients))
    if not norm <= 1:
        raise InputError(
            f"the first column of the strategy has norm {norm}: above 1, a user would count for "
            "more than is paid for."
        )
