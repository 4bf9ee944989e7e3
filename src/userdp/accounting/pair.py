"""The pair of output distributions one step is judged by, and its privacy loss.

A step's outputs on neighbours are at worst Q = N(0, sigma^2) and P = sum_k w_k N(c_k, sigma^2), the
mixture of Gaussians of Charles et al. 2024, Thm. 3 (user-level sampling is the mixture of 0 and 1,
Thm. 2). The privacy loss at output x is

    l(x) = log P(x)/Q(x) = log sum_k w_k exp((2 c_k x - c_k^2) / (2 sigma^2)),

which increases in x. Two directions are priced: "remove" compares P with Q, "add" Q with P.

Symbols: sigma = `noise`, c = `shifts`, w = `weights`. Everything here is public.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from userdp.accounting.special import Floats, log_ndtr, ndtr, normal_quantile

UNIT_ROUNDOFF = 2.0**-53

# The weights given are trusted to this relative error; the pair is made worse by as much.
WEIGHT_ERROR = 1e-12

# No array of outputs times components is larger than this.
_BLOCK = 1 << 21

# Outputs at which moments are integrated lie at most this many standard deviations apart.
_SPACING = 0.125
_MOST_POINTS = 1 << 15


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Q = N(0, noise^2) against P = sum_k weights[k] N(shifts[k], noise^2), P's mass `lost` aside.

    `lost` is mass of P that was put where the loss is infinite.
    """

    noise: float
    shifts: Floats
    weights: Floats
    lost: float = 0.0

    @staticmethod
    def of(noise: float, shifts: Floats, weights: Floats, *, tail: float) -> Pair:
        """The pair, worsened by the error of `weights` and with at most `tail` of P given up.

        Moving weight from a shift to the next larger one makes the pair easier to tell apart, in
        both directions (Charles et al. 2024, Lemma 2). So the cumulative weights are lowered by
        more than their rounding error. The shifts above which P has less than `tail` are cut off,
        and their weight is counted as an output that only P can give.

        >>> Pair.of(1.0, np.array([0.0, 1.0]), np.array([0.99, 0.01]), tail=0.0).shifts
        array([0., 1.])
        """
        order = np.argsort(shifts)
        shifts, weights = shifts[order], weights[order] / math.fsum(weights)
        below = np.cumsum(weights)[:-1]
        above = np.cumsum(weights[::-1])[::-1][1:]
        moved = WEIGHT_ERROR * np.minimum(below, above)
        weights = weights.copy()
        weights[:-1] -= moved
        weights[1:] += moved
        # The smallest weights are summed first, so `above` is accurate where it is small.
        kept = 1 + int(np.count_nonzero(above > tail))
        lost = float(above[kept - 1]) * (1 + WEIGHT_ERROR) if kept < len(weights) else 0.0
        return Pair(noise=noise, shifts=shifts[:kept], weights=weights[:kept], lost=lost)

    @property
    def least_loss(self) -> float:
        """The infimum of the loss: log w_0 if an output without the user is possible, else -inf."""
        return math.log(self.weights[0]) if self.shifts[0] == 0 else -math.inf

    def rise(self, x: Floats) -> tuple[Floats, Floats, float]:
        """log of P(x)/Q(x) without the component at shift 0; its derivative; its rounding error."""
        start = 1 if self.shifts[0] == 0 else 0
        shifts, variance = self.shifts[start:], self.noise**2
        constant = np.log(self.weights[start:]) - shifts**2 / (2 * variance)
        values, slopes = np.empty_like(x), np.empty_like(x)
        rows = max(1, _BLOCK // len(shifts))
        for first in range(0, len(x), rows):
            block = slice(first, first + rows)
            exponents = np.multiply.outer(x[block], shifts / variance) + constant
            peak = exponents.max(axis=1)
            terms = np.exp(exponents - peak[:, None])
            total = terms.sum(axis=1)
            values[block] = peak + np.log(total)
            slopes[block] = (terms @ shifts) / (total * variance)
        # Each exponent is a sum of products of size at most this; log and sum add a few units more.
        largest = float(np.abs(x).max()) * shifts[-1] / variance + float(np.abs(constant).max())
        return values, slopes, 8 * UNIT_ROUNDOFF * (largest + len(shifts) + 8)

    def loss_of_rise(self, rise: Floats) -> Floats:
        """The loss l whose part from shifts above 0 is `rise`."""
        return np.logaddexp(self.least_loss, rise) if self.shifts[0] == 0 else rise

    def range_of_outputs(self, tail: float) -> tuple[float, float]:
        """An interval outside which Q (below) and P (above) have at most `tail`."""
        reach = -normal_quantile(tail) * self.noise
        low, high = float(self.shifts[0]) - reach, float(self.shifts[-1]) + reach
        for _ in range(60):
            middle = (low + high) / 2
            if float(self.weights @ ndtr((self.shifts - middle) / self.noise)) > tail:
                low = middle
            else:
                high = middle
        return -reach, high


@dataclass(frozen=True, kw_only=True)
class Quadrature:
    """Losses at evenly spaced outputs, with the log of Q's mass there.

    For choosing noise, tilt and grid only: no bound depends on its accuracy.
    """

    x: Floats
    rise: Floats
    loss: Floats
    log_q: Floats

    @staticmethod
    def of(pair: Pair, tail: float) -> Quadrature:
        """Enough points for moments of the loss to be integrated by the trapezoid rule."""
        low, high = pair.range_of_outputs(tail)
        # The integrands are analytic in a strip of half-width pi sigma^2 around the real line.
        spacing = min(_SPACING * pair.noise, pair.noise**2)
        points = min(_MOST_POINTS, max(64, math.ceil((high - low) / spacing)))
        x = np.linspace(low, high, points)
        rise, _, _ = pair.rise(x)
        scaled = x / pair.noise
        log_q = math.log((x[1] - x[0]) / pair.noise / math.sqrt(2 * math.pi)) - scaled**2 / 2
        return Quadrature(x=x, rise=rise, loss=pair.loss_of_rise(rise), log_q=log_q)


def log_upper_tail(z: Floats) -> Floats:
    """log P(N(0, 1) > z), accurate far out."""
    return log_ndtr(-z)
