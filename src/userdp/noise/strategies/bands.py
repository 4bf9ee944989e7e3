"""Banded strategies: the lower triangular matrix C whose inverse correlates the noise.

The noise of a run is C^-1 z, with z independent. A run releases G + C^-1 z, which tells as much as
C G + z: noise that is independent, on contributions that C mixes. So a user's influence is measured
through C. Its columns have norm at most 1, and a contribution in a step then has length at most 1.

Coefficients are numbers that float32 can hold. So a computation in float32 uses this very C.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from userdp.errors import InputError

Floats = NDArray[np.float64]

# Room for rounding: columns are this much shorter than 1 before they are rounded to float32.
ROOM = 2.0**-20


@dataclass(frozen=True, kw_only=True, eq=False)
class Bands:
    """C with b bands: `coefficients[t, j]` = C[t, t - j] for the steps t < n = `steps`.

    A Toeplitz strategy has one row, which holds for all steps.
    """

    steps: int
    coefficients: Floats

    def __post_init__(self) -> None:
        rows, bands = self.coefficients.shape
        if rows not in (1, self.steps) or not 1 <= bands <= self.steps:
            raise InputError(
                f"a strategy of {self.steps} steps has 1 to {self.steps} bands and one row, or one "
                f"for each step: this one has {rows} rows and {bands} bands."
            )
        check_columns(self)

    @property
    def bands(self) -> int:
        """b, the number of bands."""
        return self.coefficients.shape[1]

    def row(self, step: int) -> Floats:
        """C[t, t], C[t, t - 1], ... as far as they are within the matrix."""
        row = self.coefficients[0 if len(self.coefficients) == 1 else step]
        return row[: step + 1]

    def columns(self) -> Floats:
        """C by columns: entry [s, j] is C[s + j, s], and zero below the matrix."""
        found = np.zeros((self.steps, self.bands))
        for j in range(self.bands):
            found[: self.steps - j, j] = (
                self.coefficients[0, j] if len(self.coefficients) == 1 else self.coefficients[j:, j]
            )
        return found

    def dense(self) -> Floats:
        """C in full, for small n."""
        found = np.zeros((self.steps, self.steps))
        columns = self.columns()
        for j in range(self.bands):
            found += np.diag(columns[: self.steps - j, j], -j)
        return found


def check_columns(strategy: Bands) -> None:
    """Refuse a C in which a step's contribution can be longer than 1, or that has no inverse."""
    columns = strategy.columns()
    longest = float(np.sqrt((columns**2).sum(axis=1)).max())
    if not (np.isfinite(columns).all() and longest <= 1):
        raise InputError(
            f"a column of the strategy has norm {longest}: above 1, a user would count for more "
            "than is paid for."
        )
    if not (columns[:, 0] > 0).all():
        raise InputError("a strategy needs a positive diagonal: without it noise has no bound.")


def from_columns(columns: Floats) -> Bands:
    """The strategy with these columns ([s, j] is C[s + j, s]), each scaled to norm 1."""
    n, bands = columns.shape
    inside = np.arange(n)[:, None] + np.arange(bands) < n
    kept = np.where(inside, columns, 0.0)
    rounded = _rounded(kept / np.linalg.norm(kept, axis=1, keepdims=True))
    rows = np.zeros((n, bands))
    for j in range(bands):
        rows[j:, j] = rounded[: n - j, j]
    return Bands(steps=n, coefficients=rows)


def toeplitz(coefficients: Floats, steps: int) -> Bands:
    """The strategy with these diagonals, scaled so that its longest column has norm 1.

    >>> toeplitz(np.array([4.0, 3.0]), 3).dense().round(5).tolist()
    [[0.8, 0.0, 0.0], [0.6, 0.8, 0.0], [0.0, 0.6, 0.8]]
    """
    kept = coefficients[:steps]
    row = _rounded(kept / np.linalg.norm(kept))
    return Bands(steps=steps, coefficients=row[None])


def identity(steps: int) -> Bands:
    """Independent noise: C is the identity."""
    return Bands(steps=steps, coefficients=np.ones((1, 1)))


def _rounded(values: Floats) -> Floats:
    return (values * (1 - ROOM)).astype(np.float32).astype(np.float64)
