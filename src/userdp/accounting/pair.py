"""The two output distributions by which a step is judged, and their privacy loss.

At worst, a step's outputs on neighbours are Q = N(0, sigma^2) and P = sum_k w_k N(c_k, sigma^2).
This is the mixture of Gaussians of Charles et al. 2024, Thm. 3. For user-level sampling (Thm. 2) it
mixes the shifts 0 and 1. The privacy loss at output x is

    l(x) = log P(x)/Q(x) = log sum_k w_k exp((2 c_k x - c_k^2) / (2 sigma^2)),

which increases in x. Two directions are priced: "remove" compares P with Q, and "add" compares Q
with P.

Other pairs (`exchange`, `laplace`) fulfil the same `Outputs` contract.

Symbols: sigma = `noise`, c = `shifts`, w = `weights`. Everything here is public.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np

from userdp.accounting import normal, roots
from userdp.accounting.normal import BLOCK, UNIT_ROUNDOFF
from userdp.accounting.special import Floats, ndtr, normal_quantile

# The given weights are trusted to this relative error. The pair is made worse by as much.
WEIGHT_ERROR = 1e-12

# Moments are integrated at outputs that are at most this many standard deviations apart.
_SPACING = 0.125
_MOST_POINTS = 1 << 15

# If there are more Gaussians than this, those at the lowest shifts are joined, up to this weight.
_MANY, _LEAST_WEIGHT = 256, 1e-30


class Direction(StrEnum):
    """Which of the two neighbours holds the user. Both directions are priced."""

    REMOVE = "remove"
    ADD = "add"


@dataclass(frozen=True, kw_only=True)
class Quadrature:
    """Losses at increasing outputs, with the log of Q's mass there.

    `guide` increases with the output, and is used to look up the output of a given loss. A
    quadrature only helps to choose noise, tilt and grid: no bound depends on its accuracy.
    """

    x: Floats
    guide: Floats
    loss: Floats
    log_q: Floats

    def capped(self, direction: Direction, cap: float) -> Quadrature:
        """The same, with `direction`'s losses above `cap` split between `cap` and infinity.

        The finite part keeps the other neighbour's mass: Q's in "remove", P's in "add".
        """
        loss, log_q = self.loss, self.log_q
        if direction is Direction.REMOVE:
            first, last = 0, int(np.searchsorted(loss, cap, side="right"))
            if last == len(loss):
                return self
            at, mass = cap, _log_sum(log_q[last:])
            loss, log_q = np.append(loss[:last], at), np.append(log_q[:last], mass)
            last += 1
        else:
            first, last = int(np.searchsorted(loss, -cap, side="left")), len(loss)
            if first == 0:
                return self
            at, mass = -cap, _log_sum((log_q + loss)[:first]) + cap
            loss, log_q = np.append(at, loss[first:]), np.append(mass, log_q[first:])
            first -= 1
        return Quadrature(
            x=self.x[first:last], guide=self.guide[first:last], loss=loss, log_q=log_q
        )


def _log_sum(values: Floats) -> float:
    peak = float(values.max())
    return peak + math.log(float(np.exp(values - peak).sum()))


class Outputs(Protocol):
    """The outputs on two neighbours, ordered such that the loss log P(x)/Q(x) increases."""

    @property
    def lost(self) -> float:
        """The mass of P with infinite loss that the masses below leave out."""
        ...

    @property
    def least_loss(self) -> float:
        """A lower bound on every loss, or -inf."""
        ...

    @property
    def largest_loss(self) -> float:
        """An upper bound on every loss, or inf."""
        ...

    @property
    def is_symmetric(self) -> bool:
        """Whether both directions have the same losses."""
        ...

    def quadrature(self, tail: float) -> Quadrature:
        """Enough points to integrate moments of the loss by the trapezoid rule."""
        ...

    def outputs_at(self, quadrature: Quadrature, losses: Floats) -> tuple[Floats, float]:
        """Increasing outputs with these losses, up to an error of at most the second result."""
        ...

    def loss_at(self, x: Floats) -> tuple[Floats, float]:
        """The losses of outputs, and their rounding error."""
        ...

    def mass_of_p(self, x: Floats) -> tuple[Floats, Floats]:
        """P's mass below, between and above `x`, and its error."""
        ...

    def mass_of_q(self, x: Floats) -> tuple[Floats, Floats]:
        """Q's mass below, between and above `x`, and its error."""
        ...

    def log_mass_of_q(self, x: Floats) -> tuple[Floats, Floats]:
        """The log of Q's mass between and above `x`, and of its error."""
        ...


def worsened(shifts: Floats, weights: Floats, tail: float) -> tuple[Floats, Floats, float]:
    """Shifts and weights, made worse by the weights' error, with at most `tail` of P given up.

    Moving weight from a shift to the next larger one makes the pair easier to tell apart, in both
    directions (Charles et al. 2024, Lemma 2). So the cumulative weights are lowered by more than
    their rounding error. The largest shifts are cut off, as long as their weight in all is below
    `tail`. That weight is the last result. It counts as an output that only P can give.
    """
    order = np.argsort(shifts)
    shifts, weights = shifts[order], weights[order] / math.fsum(weights)
    below = np.cumsum(weights)[:-1]
    above = np.cumsum(weights[::-1])[::-1][1:]
    moved = WEIGHT_ERROR * np.minimum(below, above)
    weights = weights.copy()
    weights[:-1] -= moved
    weights[1:] += moved
    if len(weights) > _MANY:
        # Moving the lowest weights up to one shift is worse still, and saves time.
        first = int(np.count_nonzero(below < _LEAST_WEIGHT))
        weights[first] += weights[:first].sum()
        shifts, weights, above = shifts[first:], weights[first:], above[first:]
    # `above` sums the smallest weights first, so it is accurate where it is small.
    kept = 1 + int(np.count_nonzero(above > tail))
    lost = float(above[kept - 1]) * (1 + WEIGHT_ERROR) if kept < len(weights) else 0.0
    return shifts[:kept], weights[:kept], lost


def log_ratio(
    x: Floats, noise: float, shifts: Floats, weights: Floats
) -> tuple[Floats, Floats, float]:
    """The log of sum_k w_k N(c_k)(x) / N(0)(x), its derivative, and its rounding error."""
    variance = noise**2
    constant = np.log(weights) - shifts**2 / (2 * variance)
    values, slopes = np.empty_like(x), np.empty_like(x)
    rows = max(1, BLOCK // len(shifts))
    for first in range(0, len(x), rows):
        block = slice(first, first + rows)
        exponents = np.multiply.outer(x[block], shifts / variance) + constant
        peak = exponents.max(axis=1)
        terms = np.exp(exponents - peak[:, None])
        total = terms.sum(axis=1)
        values[block] = peak + np.log(total)
        slopes[block] = (terms @ shifts) / (total * variance)
    # Each exponent is a sum of products of at most this size. Log and sum add a few units more.
    largest = float(np.abs(x).max()) * shifts[-1] / variance + float(np.abs(constant).max())
    return values, slopes, 8 * UNIT_ROUNDOFF * (largest + len(shifts) + 8)


def reach_of(noise: float, shifts: Floats, weights: Floats, tail: float) -> float:
    """An output above which the mixture has at most `tail`."""
    reach = -normal_quantile(tail) * noise
    # The quantile has a rounding error, so the upper end lies a little higher.
    low, high = float(shifts[0]) - reach, float(shifts[-1]) + reach + 1e-6 * noise

    def excess(x: float) -> float:
        above = float(weights @ ndtr((shifts - x) / noise))
        return math.log(max(above, 1e-320) / tail)

    return roots.root(excess, low, high, within=1e-9 * noise)


def evenly_spaced(low: float, high: float, noise: float) -> Floats:
    """Outputs close enough together for the trapezoid rule."""
    # The integrands are analytic in a strip of half-width pi sigma^2 around the real line.
    spacing = min(_SPACING * noise, noise**2)
    return np.linspace(low, high, min(_MOST_POINTS, max(64, math.ceil((high - low) / spacing))))


@dataclass(frozen=True, kw_only=True)
class MixturePair:
    """Q = N(0, noise^2) against P = sum_k weights[k] N(shifts[k], noise^2).

    `lost` is further mass of P, which was put where the loss is infinite.
    """

    noise: float
    shifts: Floats
    weights: Floats
    lost: float = 0.0

    @staticmethod
    def of(noise: float, shifts: Floats, weights: Floats, *, tail: float) -> MixturePair:
        """The pair, made worse by the error of `weights`, with at most `tail` of P given up.

        >>> MixturePair.of(1.0, np.array([0.0, 1.0]), np.array([0.99, 0.01]), tail=0.0).shifts
        array([0., 1.])
        """
        shifts, weights, lost = worsened(shifts, weights, tail)
        return MixturePair(noise=noise, shifts=shifts, weights=weights, lost=lost)

    @property
    def least_loss(self) -> float:
        """The infimum of the loss: log w_0 if the user may be absent, else -inf."""
        return math.log(self.weights[0]) if self.shifts[0] == 0 else -math.inf

    @property
    def largest_loss(self) -> float:
        """Far out every loss occurs."""
        return math.inf

    @property
    def is_symmetric(self) -> bool:
        """Two Gaussians at a distance can be exchanged; a mixture and a Gaussian cannot."""
        return len(self.shifts) == 1

    def _rise(self, x: Floats) -> tuple[Floats, Floats, float]:
        """log P(x)/Q(x) without the component at shift 0, its derivative, its rounding error."""
        start = 1 if self.shifts[0] == 0 else 0
        return log_ratio(x, self.noise, self.shifts[start:], self.weights[start:])

    def _loss_of_rise(self, rise: Floats) -> Floats:
        """The whole loss, where shifts above 0 give `rise`."""
        return np.logaddexp(self.least_loss, rise) if self.shifts[0] == 0 else rise

    def quadrature(self, tail: float) -> Quadrature:
        """Outputs outside which Q (below) and P (above) have at most `tail`."""
        low = normal_quantile(tail) * self.noise
        high = reach_of(self.noise, self.shifts, self.weights, tail)
        x = evenly_spaced(low, high, self.noise)
        rise, _, _ = self._rise(x)
        scaled = x / self.noise
        log_q = math.log((x[1] - x[0]) / self.noise / math.sqrt(2 * math.pi)) - scaled**2 / 2
        return Quadrature(x=x, guide=rise, loss=self._loss_of_rise(rise), log_q=log_q)

    def outputs_at(self, quadrature: Quadrature, losses: Floats) -> tuple[Floats, float]:
        """By Newton's method on the rise, which is convex, so it converges from everywhere."""
        if self.shifts[0] == 0:
            with np.errstate(divide="ignore", invalid="ignore"):
                target = losses + np.log(-np.expm1(self.least_loss - losses))
        else:
            target = losses
        # Next to the least loss, the difference above rounds to nothing. The residual shows it.
        target = np.clip(target, quadrature.guide[0], quadrature.guide[-1])
        x = np.interp(target, quadrature.guide, quadrature.x)
        for _ in range(8):
            value, slope, _ = self._rise(x)
            gap = value - target
            x = x - gap / slope
            if float(np.abs(gap).max()) <= 1e-7:
                break
        x = np.maximum.accumulate(x)
        value, _, rounding = self._rise(x)
        error = float(np.abs(self._loss_of_rise(value) - losses).max())
        return x, error + rounding + 8 * UNIT_ROUNDOFF * float(np.abs(losses).max())

    def loss_at(self, x: Floats) -> tuple[Floats, float]:
        """The rise together with the component at shift 0."""
        rise, _, rounding = self._rise(x)
        loss = self._loss_of_rise(rise)
        return loss, rounding + 8 * UNIT_ROUNDOFF * (1 + float(np.abs(loss).max()))

    def mass_of_p(self, x: Floats) -> tuple[Floats, Floats]:
        """The mass of the mixture."""
        return normal.mixture_masses(x, self.shifts, self.weights, self.noise)

    def mass_of_q(self, x: Floats) -> tuple[Floats, Floats]:
        """The mass of the Gaussian."""
        return normal.masses(x / self.noise)

    def log_mass_of_q(self, x: Floats) -> tuple[Floats, Floats]:
        """The log of the Gaussian's mass, accurate where the mass underflows."""
        return normal.log_masses(x / self.noise)
