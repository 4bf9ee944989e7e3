# pyright: basic
"""The functions that we use from scipy, with types, which scipy does not have."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

Floats = NDArray[np.float64]


def ndtr(x: Floats) -> Floats:
    """The distribution function of N(0, 1)."""
    return special.ndtr(x)


def log_ndtr(x: Floats) -> Floats:
    """The log of `ndtr`, accurate far out."""
    return special.log_ndtr(x)


def log_normal_cdf(x: float) -> float:
    """`log_ndtr` of a number."""
    return float(special.log_ndtr(x))


def normal_quantile(probability: float) -> float:
    """The inverse of `ndtr`."""
    return float(special.ndtri(probability))


def erfcx(x: float) -> float:
    """exp(x^2) erfc(x)."""
    return float(special.erfcx(x))


def gammaln(x: Floats | float) -> Floats:
    """The logarithm of the gamma function."""
    return np.asarray(special.gammaln(x), dtype=np.float64)


def binomial_pmf(trials: int, probability: float) -> list[float]:
    """P(Binomial = k) for k = 0 to `trials`."""
    return stats.binom.pmf(np.arange(trials + 1), trials, probability).tolist()


def brent(
    function: Callable[[float], float], low: float, high: float, *, within: float, relative: float
) -> float:
    """A zero of `function` between two points where its sign differs, by Brent's method."""
    # scipy refuses smaller tolerances.
    within, relative = max(within, 1e-300), max(relative, 4 * np.finfo(float).eps)
    return float(optimize.brentq(function, low, high, xtol=within, rtol=relative, maxiter=2000))  # type: ignore[reportArgumentType]


def binomial_tail(above: int, trials: int, probability: float) -> float:
    """P(Binomial > `above`)."""
    return float(stats.binom.sf(above, trials, probability))
