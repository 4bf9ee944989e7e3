"""Replacing a user: the neighbours hold different users, who at worst pull in opposite directions.

At worst the outputs on neighbours are P = sum_k w_k N(c_k, sigma^2) and
Q = sum_k w_k N(-c_k, sigma^2), with the same weights. A step adds K update vectors of the user,
each of norm at most 1. K is drawn by coins that do not look at what the records say.

The proof holds for any step, any test phi with values in [0, 1] and any vectors. Let f(u) be the
mean of phi under N(u, sigma^2 I), and f(0) = Phi(a). By Neyman and Pearson, Phi(a - |u|/sigma) <=
f(u) <= Phi(a + |u|/sigma). The sum of K vectors has |u| <= K, so the test accepts with probability
at most E Phi(a + K/sigma) on one neighbour and at least E Phi(a - K/sigma) on the other. Those are
exactly the probabilities that the output exceeds -a sigma under P and under Q. So no test of the
neighbours is better than a test of P and Q. This pair therefore dominates, also in adaptive
composition (Zhu, Dong and Wang 2022, Thm. 10). With one record in a group it is the rule of
`dp_accounting`.

Symbols: sigma = `noise`, c = `shifts`, w = `weights`. Everything here is public.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from userdp.accounting import normal, pair
from userdp.accounting.normal import UNIT_ROUNDOFF
from userdp.accounting.pair import Quadrature
from userdp.accounting.special import Floats


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """P = sum_k weights[k] N(shifts[k], noise^2) against its mirror image, `lost` of P aside."""

    noise: float
    shifts: Floats
    weights: Floats
    lost: float = 0.0

    @staticmethod
    def of(noise: float, shifts: Floats, weights: Floats, *, tail: float) -> Exchange:
        """The pair, made worse by the error of `weights`, with at most `tail` of P given up."""
        shifts, weights, lost = pair.worsened(shifts, weights, tail)
        return Exchange(noise=noise, shifts=shifts, weights=weights, lost=lost)

    @property
    def least_loss(self) -> float:
        """Far out every loss occurs."""
        return -math.inf

    @property
    def largest_loss(self) -> float:
        """Far out every loss occurs."""
        return math.inf

    @property
    def is_symmetric(self) -> bool:
        """Mirroring the outputs exchanges the neighbours."""
        return True

    def _loss(self, x: Floats) -> tuple[Floats, Floats, float]:
        """The loss, its derivative and its rounding error."""
        up, up_slope, up_error = pair.log_ratio(x, self.noise, self.shifts, self.weights)
        down, down_slope, down_error = pair.log_ratio(-x, self.noise, self.shifts, self.weights)
        return up - down, up_slope + down_slope, up_error + down_error

    def quadrature(self, tail: float) -> Quadrature:
        """Outputs outside which Q (below) and P (above) have at most `tail`."""
        high = pair.reach_of(self.noise, self.shifts, self.weights, tail)
        x = pair.evenly_spaced(-high, high, self.noise)
        loss, _, _ = self._loss(x)
        loss = np.maximum.accumulate(loss)
        down, _, _ = pair.log_ratio(-x, self.noise, self.shifts, self.weights)
        scaled = x / self.noise
        density = math.log((x[1] - x[0]) / self.noise / math.sqrt(2 * math.pi)) - scaled**2 / 2
        return Quadrature(x=x, guide=loss, loss=loss, log_q=density + down)

    def outputs_at(self, quadrature: Quadrature, losses: Floats) -> tuple[Floats, float]:
        """By Newton's method, kept between the neighbouring points of the quadrature."""
        x = np.interp(losses, quadrature.guide, quadrature.x)
        place = np.searchsorted(quadrature.guide, losses)
        last = len(quadrature.x) - 1
        low, high = quadrature.x[np.maximum(place - 1, 0)], quadrature.x[np.minimum(place, last)]
        for _ in range(8):
            value, slope, _ = self._loss(x)
            gap = value - losses
            # With little noise the loss is flat in the middle, and the slope underflows there.
            with np.errstate(over="ignore"):
                x = np.clip(x - gap / np.maximum(slope, 1e-300), low, high)
            if float(np.abs(gap).max()) <= 1e-9:
                break
        x = np.maximum.accumulate(x)
        value, _, rounding = self._loss(x)
        error = float(np.abs(value - losses).max())
        return x, error + rounding + 8 * UNIT_ROUNDOFF * float(np.abs(losses).max())

    def loss_at(self, x: Floats) -> tuple[Floats, float]:
        """The difference of both rises."""
        loss, _, rounding = self._loss(x)
        return loss, rounding + 8 * UNIT_ROUNDOFF * float(np.abs(loss).max())

    def mass_of_p(self, x: Floats) -> tuple[Floats, Floats]:
        """The mass of the mixture."""
        return normal.mixture_masses(x, self.shifts, self.weights, self.noise)

    def mass_of_q(self, x: Floats) -> tuple[Floats, Floats]:
        """The mass of the mirror image."""
        return normal.mixture_masses(x, -self.shifts, self.weights, self.noise)

    def log_mass_of_q(self, x: Floats) -> tuple[Floats, Floats]:
        """The log of the mirror image's mass, accurate where the mass underflows."""
        return normal.log_mixture_masses(x, -self.shifts, self.weights, self.noise)
