"""Laplace noise: P = (1 - q) Q + q Laplace(1, b) against Q = Laplace(0, b).

Without sampling (q = 1) the loss is -1/b for x <= 0, (2x - 1)/b between 0 and 1, and 1/b for
x >= 1. With sampling it is log(1 - q + q e^loss). Every loss is finite.

Symbols: b = `noise`, q = `rate`. Everything here is public.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from userdp.accounting.normal import SPECIAL, UNIT_ROUNDOFF, between
from userdp.accounting.pair import Quadrature
from userdp.accounting.special import Floats

# Points between 0 and 1 at which moments are integrated.
_POINTS = 2048


@dataclass(frozen=True, kw_only=True)
class Laplace:
    """Laplace(0, noise), against the same with a user at distance 1 who is there at `rate`."""

    noise: float
    rate: float

    @property
    def lost(self) -> float:
        """Nothing is cut off."""
        return 0.0

    @property
    def least_loss(self) -> float:
        """The loss of every output below 0, lowered a little to cover rounding."""
        value = float(self._sampled(np.array([-1 / self.noise]))[0])
        return value - 64 * UNIT_ROUNDOFF * (1 + 1 / self.noise)

    @property
    def largest_loss(self) -> float:
        """The loss of every output above 1, raised a little to cover rounding."""
        value = float(self._sampled(np.array([1 / self.noise]))[0])
        return value + 64 * UNIT_ROUNDOFF * (1 + 1 / self.noise)

    @property
    def is_symmetric(self) -> bool:
        """Whether the neighbours can be exchanged: only without sampling."""
        return self.rate == 1

    def _sampled(self, loss: Floats) -> Floats:
        """The loss when the user is there with probability `rate`."""
        if self.rate == 1:
            return loss
        return np.logaddexp(math.log1p(-self.rate), math.log(self.rate) + loss)

    def quadrature(self, tail: float) -> Quadrature:
        """The two ends, each with all the mass beyond it, and points between them."""
        del tail  # no output is left out
        x = (np.arange(_POINTS) + 0.5) / _POINTS
        x = np.concatenate([[0.0], x, [1.0]])
        log_q = -x / self.noise - math.log(2 * self.noise * _POINTS)
        log_q[0], log_q[-1] = -math.log(2), -math.log(2) - 1 / self.noise
        loss = self._sampled((2 * x - 1) / self.noise)
        return Quadrature(x=x, guide=x, loss=loss, log_q=log_q)

    def outputs_at(self, quadrature: Quadrature, losses: Floats) -> tuple[Floats, float]:
        """The outputs, in closed form. The residual shows how they were rounded."""
        del quadrature
        unsampled = losses
        if self.rate < 1:
            # e^loss = 1 - q + q e^unsampled, so e^unsampled = 1 + (e^loss - 1) / q.
            with np.errstate(divide="ignore", invalid="ignore"):
                unsampled = np.log(np.maximum(1 + np.expm1(losses) / self.rate, 1e-300))
        x = np.clip((unsampled * self.noise + 1) / 2, 0.0, 1.0)
        x = np.maximum.accumulate(x)
        error = float(np.abs(self._sampled((2 * x - 1) / self.noise) - losses).max())
        largest = 1 / self.noise + float(np.abs(losses).max()) - math.log(self.rate)
        return x, error + 16 * UNIT_ROUNDOFF * (1 + largest)

    def loss_at(self, x: Floats) -> tuple[Floats, float]:
        """Linear between 0 and 1, constant outside."""
        loss = self._sampled((2 * np.clip(x, 0.0, 1.0) - 1) / self.noise)
        return loss, 64 * UNIT_ROUNDOFF * (1 + 1 / self.noise - math.log(self.rate))

    def mass_of_p(self, x: Floats) -> tuple[Floats, Floats]:
        """The mass of the mixture of both Laplace distributions."""
        with_user, with_error = _masses((x - 1) / self.noise)
        without, error = _masses(x / self.noise)
        mass = self.rate * with_user + (1 - self.rate) * without
        return mass, self.rate * with_error + (1 - self.rate) * error + SPECIAL * mass

    def mass_of_q(self, x: Floats) -> tuple[Floats, Floats]:
        """The mass of Laplace(0, noise)."""
        return _masses(x / self.noise)

    def log_mass_of_q(self, x: Floats) -> tuple[Floats, Floats]:
        """The log of Laplace(0, noise)'s mass between and above `x`, and of its error."""
        mass, error = _masses(x / self.noise)
        with np.errstate(divide="ignore"):
            return np.log(mass[1:]), np.log(error[1:] + SPECIAL * mass[1:])


def _masses(z: Floats) -> tuple[Floats, Floats]:
    """The mass of Laplace(0, 1) below, between and above increasing `z`, and its error."""
    mass, size = between(np.exp(-np.abs(z)) / 2, z <= 0)
    error = SPECIAL * (1 + np.abs(np.where(np.isfinite(z), z, 0.0)).max())
    return mass, error * size + UNIT_ROUNDOFF * mass
