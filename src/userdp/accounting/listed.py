"""A pair of outputs that is given as a list: finitely many losses, with the masses of P and Q.

`averages` makes such lists. An output is named by its loss, so a point between two outputs is a
loss, too. Everything here is public.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from userdp.accounting.normal import UNIT_ROUNDOFF
from userdp.accounting.pair import Quadrature
from userdp.accounting.special import Floats


@dataclass(frozen=True, kw_only=True)
class Listed:
    """Increasing losses log P/Q, each wrong by at most `slack`, and masses.

    The masses have the relative error `relative`. `lost` is the mass that only P has, and `only_q`
    the mass that only Q has.
    """

    loss: Floats
    p: Floats
    q: Floats
    lost: float
    only_q: float
    relative: float
    slack: float
    is_symmetric: bool = False

    @property
    def least_loss(self) -> float:
        """The first loss, unless Q has mass of its own."""
        return -math.inf if self.only_q > 0 else float(self.loss[0]) - self.slack

    @property
    def largest_loss(self) -> float:
        """The last loss."""
        return float(self.loss[-1]) + self.slack

    def quadrature(self, tail: float) -> Quadrature:
        """The losses themselves, those without mass aside; nothing is cut off."""
        del tail
        kept = self.q > 0
        loss = self.loss[kept]
        x = loss.copy()
        # A point belongs to the outputs below it. The first output must lie above the first point.
        x[0] -= 1e-9 * (1 + abs(x[0]))
        return Quadrature(x=x, guide=loss, loss=loss, log_q=np.log(self.q[kept]))

    def outputs_at(self, quadrature: Quadrature, losses: Floats) -> tuple[Floats, float]:
        """The losses are the outputs."""
        del quadrature
        return losses, self.slack + 8 * UNIT_ROUNDOFF * (1 + float(np.abs(losses).max()))

    def loss_at(self, x: Floats) -> tuple[Floats, float]:
        """The outputs are the losses."""
        return x, self.slack

    def mass_of_p(self, x: Floats) -> tuple[Floats, Floats]:
        """The mass of P in the list."""
        mass = self._between(x, self.p)
        return mass, mass * self._error

    def mass_of_q(self, x: Floats) -> tuple[Floats, Floats]:
        """The mass of Q in the list, and what only Q has below it."""
        mass = self._between(x, self.q)
        mass[0] += self.only_q
        return mass, mass * self._error

    def log_mass_of_q(self, x: Floats) -> tuple[Floats, Floats]:
        """The log of Q's mass between and above `x`, and of its error."""
        with np.errstate(divide="ignore"):
            mass = np.log(self._between(x, self.q)[1:])
        return mass, mass + math.log(self._error)

    @property
    def _error(self) -> float:
        return self.relative + (len(self.loss) + 8) * UNIT_ROUNDOFF

    def _between(self, x: Floats, mass: Floats) -> Floats:
        """The mass below, between and above `x`; outputs at a point count as below it."""
        cells = np.bincount(np.searchsorted(x, self.loss), mass, minlength=len(x) + 1)
        return np.asarray(cells, dtype=np.float64)
