"""Sampling without replacement: each step takes exactly m of N places, a uniformly random set.

A user has one place. Others fill the remaining ones, so a user who is drawn pushes somebody out.
That may help an attacker who chose what the others say. Let g = m / N.

Fix m - 1 other places and one more, and let v be what the last one says. With probability g the
user takes its place. Telling the attacker which places these are only helps, so it is enough to
compare, for vectors u, u' and v of norm at most 1, and up to a common shift,

    g N(u, sigma^2 I) + (1 - g) N(v, sigma^2 I)  and  g N(u', sigma^2 I) + (1 - g) N(v, sigma^2 I).

Zero-out compares u with u' = 0. So does add-remove, where a place stays empty if nobody has it.
Replace compares any u and u'.

Claim. Write N(c) for N(c, sigma^2) in one dimension. For alpha >= 1, the hockey-stick divergence is
largest for

    removing:   g N(2) + (1 - g) N(0)   against   g N(1) + (1 - g) N(0),
    adding:     g N(1) + (1 - g) N(0)   against   N(0),
    replacing:  g N(2) + (1 - g) N(0)   against   N(0).

Proof. Let f(w) be the mean of a test with values in [0, 1] under N(w, sigma^2 I). The divergence is
the largest g f(u) - alpha g f(u') - (alpha - 1) (1 - g) f(v) over all tests. By Neyman and Pearson,
if f(w) = Phi(a), then f(w') is between Phi(a - |w - w'| / sigma) and Phi(a + |w - w'| / sigma), and
thresholds in one dimension reach both ends. Both f(u') and f(v) count against the divergence.
  * Removing: start from f(u') = f(0) = Phi(a). Then f(u) <= Phi(a + 1 / sigma) and f(v) >= Phi(a -
    1 / sigma): v pulls as far as it can against u.
  * Adding: now u = 0 and u' is the user. Start from f(0). Both others are at least Phi(a - 1 /
    sigma): the user and v are alike.
  * Replacing: start from f(u). Both others are at a distance of at most 2.
Shifts make these the pairs above. Replacing is Zhu, Dong and Wang 2022, Thm. 11; Balle, Barthe and
Gaboardi 2018.

For alpha < 1, H_alpha(P, Q) = 1 - alpha + alpha H_(1/alpha)(Q, P), which is the other direction.
The supremum over all pairs is convex in alpha, so it belongs to one pair (Zhu, Dong and Wang 2022):
positive losses are those of removing, negative ones mirror those of adding, and what is left of the
masses has loss 0. This pair dominates, so it does in adaptive composition, where u, u' and v may
depend on earlier outputs.

Symbols: g = `rate`, sigma = `noise`. Everything here is public.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from userdp.accounting import normal, pair
from userdp.accounting.normal import SPECIAL, UNIT_ROUNDOFF
from userdp.accounting.pair import Outputs, Quadrature
from userdp.accounting.special import Floats, ndtr


@dataclass(frozen=True, kw_only=True)
class Tail:
    """The outputs of (1 - g) N(0) + g N(far) and (1 - g) N(0) + g N(near) above `begin`.

    There the first is the likelier one, and the loss increases: log(1 - g + g e^y) does, and its
    slope in y increases, too.
    """

    noise: float
    rate: float
    near: float
    far: float

    @property
    def begin(self) -> float:
        """The output where both are as likely."""
        return (self.near + self.far) / 2

    @cached_property
    def likelier(self) -> tuple[Floats, Floats]:
        """Shifts and weights of the first."""
        return np.array([0.0, self.far]), np.array([1 - self.rate, self.rate])

    @cached_property
    def other(self) -> tuple[Floats, Floats]:
        """Shifts and weights of the second."""
        if self.near == 0:
            return np.array([0.0]), np.array([1.0])
        return np.array([0.0, self.near]), np.array([1 - self.rate, self.rate])

    def loss(self, x: Floats) -> tuple[Floats, Floats, float]:
        """The loss, its derivative and its rounding error."""
        up, up_slope, up_error = pair.log_ratio(x, self.noise, *self.likelier)
        if self.near == 0:
            return up, up_slope, up_error
        down, down_slope, down_error = pair.log_ratio(x, self.noise, *self.other)
        return up - down, up_slope - down_slope, up_error + down_error

    def points(self, tail: float) -> tuple[Floats, float]:
        """Outputs in the middle of cells, above which `tail` remains, and the cells' width."""
        reach = pair.reach_of(self.noise, *self.likelier, tail)
        edges = pair.evenly_spaced(self.begin, max(reach, self.begin + 8 * self.noise), self.noise)
        return (edges[1:] + edges[:-1]) / 2, float(edges[1] - edges[0])

    def log_density(self, x: Floats, *, of_likelier: bool) -> Floats:
        """The log of one of the two densities."""
        ratio, _, _ = pair.log_ratio(x, self.noise, *(self.likelier if of_likelier else self.other))
        return ratio - (x / self.noise) ** 2 / 2 - math.log(self.noise * math.sqrt(2 * math.pi))

    def outputs_at(self, losses: Floats, points: Floats) -> tuple[Floats, float]:
        """The distances from `begin` of outputs with increasing `losses`, and the losses' error."""
        if not len(losses):
            return losses, 0.0
        known = np.append(self.begin, points)
        guide = np.maximum.accumulate(np.append(0.0, self.loss(points)[0]))
        x = np.interp(losses, guide, known)
        place = np.searchsorted(guide, losses)
        last = len(known) - 1
        low, high = known[np.clip(place - 1, 0, last)], known[np.clip(place, 0, last)]
        for _ in range(8):
            value, slope, _ = self.loss(x)
            gap = value - losses
            with np.errstate(over="ignore"):
                x = np.clip(x - gap / np.maximum(slope, 1e-300), low, high)
            if float(np.abs(gap).max(initial=0.0)) <= 1e-9:
                break
        x = np.maximum.accumulate(x)
        distance = x - self.begin
        # What is returned is the distance, so the loss is taken where the distance leads.
        value, _, rounding = self.loss(self.begin + distance)
        return distance, float(np.abs(value - losses).max(initial=0.0)) + rounding


@dataclass(frozen=True, kw_only=True)
class TwoTails:
    """Positive losses of `upper`, the mirror image of those of `lower`, and an atom of loss 0.

    An output is named by its distance from where a tail begins: above 0 in the upper tail, below 0
    in the mirrored lower tail. The atom lies at 0.
    """

    upper: Tail
    lower: Tail

    lost: float = 0.0

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
        """Whether both tails are the same."""
        return self.upper == self.lower

    @property
    def atom(self) -> float:
        """What both tails leave of the masses of P, and of Q: the same."""
        ends = np.array([self.upper.begin, -self.lower.begin]) / self.upper.noise
        above, below = (float(value) for value in ndtr(ends))
        return (1 - self.upper.rate) * (above - below)

    def quadrature(self, tail: float) -> Quadrature:
        """The middles of cells of both tails, and the atom."""
        up, up_width = self.upper.points(tail)
        down, down_width = self.lower.points(tail)
        gains, losses = self.upper.loss(up)[0], self.lower.loss(down)[0]
        log_up = self.upper.log_density(up, of_likelier=False) + math.log(up_width)
        log_down = self.lower.log_density(down, of_likelier=True) + math.log(down_width)
        loss = np.concatenate([-losses[::-1], [0.0], gains])
        return Quadrature(
            x=np.concatenate([-(down - self.lower.begin)[::-1], [0.0], up - self.upper.begin]),
            guide=np.maximum.accumulate(loss),
            loss=np.maximum.accumulate(loss),
            log_q=np.concatenate([log_down[::-1], [math.log(max(self.atom, 1e-300))], log_up]),
        )

    def outputs_at(self, quadrature: Quadrature, losses: Floats) -> tuple[Floats, float]:
        """Each tail on its own, by Newton's method between the points of the quadrature."""
        x = np.zeros_like(losses)
        above, below = losses > 0, losses < 0
        up = quadrature.x[quadrature.x > 0] + self.upper.begin
        down = (self.lower.begin - quadrature.x[quadrature.x < 0])[::-1]
        x[above], up_error = self.upper.outputs_at(losses[above], up)
        mirrored, down_error = self.lower.outputs_at(-losses[below][::-1], down)
        x[below] = -mirrored[::-1]
        size = float(np.abs(losses).max())
        return x, max(up_error, down_error) + 8 * UNIT_ROUNDOFF * (1 + size)

    def loss_at(self, x: Floats) -> tuple[Floats, float]:
        """The loss of the tail in which an output lies."""
        up, _, up_error = self.upper.loss(self.upper.begin + np.maximum(x, 0.0))
        down, _, down_error = self.lower.loss(self.lower.begin + np.maximum(-x, 0.0))
        loss = np.where(x > 0, up, np.where(x < 0, -down, 0.0))
        return loss, up_error + down_error + 8 * UNIT_ROUNDOFF * float(np.abs(loss).max())

    def mass_of_p(self, x: Floats) -> tuple[Floats, Floats]:
        """The likelier mixture of the upper tail, the other one of the lower."""
        return self._mass(x, self.upper.likelier, self.lower.other)

    def mass_of_q(self, x: Floats) -> tuple[Floats, Floats]:
        """The other mixture of the upper tail, the likelier one of the lower."""
        return self._mass(x, self.upper.other, self.lower.likelier)

    def _mass(
        self, x: Floats, upper: tuple[Floats, Floats], lower: tuple[Floats, Floats]
    ) -> tuple[Floats, Floats]:
        mass, error = np.zeros(len(x) + 1), np.zeros(len(x) + 1)
        up, up_error = normal.mixture_masses(self._upper_edges(x), *upper, self.upper.noise)
        down, down_error = normal.mixture_masses(self._lower_edges(x), *lower, self.lower.noise)
        # The first mass of each lies before the tail begins. The lower tail is mirrored.
        _add(mass, up[1:], down[:0:-1])
        _add(error, up_error[1:], down_error[:0:-1])
        at = _cell_of_atom(x)
        mass[at] += self.atom
        error[at] += SPECIAL
        return mass, error + 4 * UNIT_ROUNDOFF * mass

    def log_mass_of_q(self, x: Floats) -> tuple[Floats, Floats]:
        """The log of the same masses, accurate where they underflow."""
        mass, error = np.full(len(x) + 1, -np.inf), np.full(len(x) + 1, -np.inf)
        up, up_error = normal.log_mixture_masses(
            self._upper_edges(x), *self.upper.other, self.upper.noise
        )
        down, down_error = normal.log_mixture_masses(
            self._lower_edges(x), *self.lower.likelier, self.lower.noise
        )
        _log_add(mass, up, down[::-1])
        _log_add(error, up_error, down_error[::-1])
        at = _cell_of_atom(x)
        mass[at] = np.logaddexp(mass[at], math.log(max(self.atom, 1e-300)))
        error[at] = np.logaddexp(error[at], math.log(SPECIAL))
        return mass[1:], np.logaddexp(error, mass + math.log(4 * UNIT_ROUNDOFF))[1:]

    def _upper_edges(self, x: Floats) -> Floats:
        return np.append(self.upper.begin, self.upper.begin + x[x > 0])

    def _lower_edges(self, x: Floats) -> Floats:
        return np.append(self.lower.begin, self.lower.begin - x[x < 0][::-1])


def _add(cells: Floats, upper: Floats, lower: Floats) -> None:
    """Add masses of the upper tail to the last cells, and of the lower tail to the first."""
    cells[len(cells) - len(upper) :] += upper
    cells[: len(lower)] += lower


def _log_add(cells: Floats, upper: Floats, lower: Floats) -> None:
    """`_add` for logarithms."""
    last, first = cells[len(cells) - len(upper) :], cells[: len(lower)]
    np.logaddexp(last, upper, out=last)
    np.logaddexp(first, lower, out=first)


def _cell_of_atom(x: Floats) -> int:
    """The cell of the output 0; outputs at a point count as below it."""
    return int(np.searchsorted(x, 0.0))


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A user whose place is drawn with chance `rate`, in the place of somebody else."""

    noise: float
    rate: float
    replaces: bool
    count: int

    def branches(self, tail: float) -> Sequence[tuple[float, Outputs]]:
        """A single pair."""
        del tail
        far = Tail(noise=self.noise, rate=self.rate, near=0.0, far=2.0)
        if self.replaces:
            return [(1.0, TwoTails(upper=far, lower=far))]
        upper = Tail(noise=self.noise, rate=self.rate, near=1.0, far=2.0)
        lower = Tail(noise=self.noise, rate=self.rate, near=0.0, far=1.0)
        return [(1.0, TwoTails(upper=upper, lower=lower))]
