"""From a weighted sum of clipped updates to their average, and how far one user moves it.

A step wants the average f = sum_k w_k D_k / sum_k w_k over its users k. Its denominator is secret,
so it is replaced (McMahan et al. 2018, Sec. 2):

    f_f = sum_k w_k D_k / (q W)                      sensitivity S / (q W)
    f_c = sum_k w_k D_k / max(q W_min, sum_k w_k)    sensitivity 2 S / (q W_min)

W is the public total weight of all users, q the sampling rate, S the bound on every update.

**Lemma 1 as printed is false for f_c.** It asks for ||w_k D_k|| <= S only. Take q W_min = 1 and 17
users of weight 1/17 with D = 17 S u, for a direction u of norm 1. Each has w D = S u, their weights
add up to 1, and f_c = 17 S u. With one more user of weight 1 and D = -S u it is 16 S u / 2 = 8 S u.
So one user moved it by 9 S, not by 2 S, and smaller weights move it as far as one likes. What is
needed is ||D_k|| <= S, which clipping gives. Proof, with m = q W_min, A the sum and V the weight
without the user, w <= 1 and D the user's own:

  * V + w <= m: the change is w D / m, at most S / m.
  * m <= V: it is w (D - A / V) / (V + w). Both D and the average A / V have norm at most S, so it
    is at most 2 S w / (V + w) <= 2 S / m.
  * V < m < V + w: it is w D / (V + w) - A (V + w - m) / (m (V + w)). Here ||A|| <= S V <= S m, and
    V + w - m <= w, so both terms are at most S w / (V + w). The sum is at most 2 S / m.

Every sum is divided by the public expected number of users after the noise (`PrivateStep`). So an
estimator only scales the sum before the noise, and says how far one user moves the scaled sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Estimator(Protocol):
    """Scales the sum of a step before noise is added."""

    @property
    def is_bounded(self) -> bool:
        """Whether one user moves the estimate by a known amount only. If not, nothing is priced."""
        ...

    def scale(self, weight: float) -> float:
        """What the sum of users of this weight is multiplied by. The weight is secret."""
        ...

    def sensitivity(self, bound: float) -> float:
        """How far one user, whose update has at most the norm `bound`, moves the scaled sum."""
        ...


@dataclass(frozen=True, kw_only=True)
class FixedDenominator:
    """f_f: the sum times a public factor, the number of users over their total weight.

    >>> FixedDenominator().scale(17.0)
    1.0
    """

    factor: float = 1.0

    @property
    def is_bounded(self) -> bool:
        """Yes: one user moves the average by at most the bound of an update, times `factor`."""
        return True

    def scale(self, weight: float) -> float:
        """K / W, for K users."""
        del weight
        return self.factor

    def sensitivity(self, bound: float) -> float:
        """S K / W."""
        return bound * self.factor


@dataclass(frozen=True, kw_only=True)
class ClippedDenominator:
    """f_c: the sum over its own weight, or over the least weight if that is larger.

    `expected_groups` is q K for K users, and `least` is q W_min. Both are public.

    >>> ClippedDenominator(expected_groups=8.0, least=4.0).scale(2.0)
    2.0
    >>> ClippedDenominator(expected_groups=8.0, least=4.0).sensitivity(1.0)
    4.0
    """

    expected_groups: float
    least: float

    @property
    def is_bounded(self) -> bool:
        """Yes: by at most twice the bound of an update over the least weight."""
        return True

    def scale(self, weight: float) -> float:
        """q K / max(q W_min, sum_k w_k)."""
        return self.expected_groups / max(self.least, weight)

    def sensitivity(self, bound: float) -> float:
        """2 S q K / (q W_min)."""
        return 2 * bound * self.expected_groups / self.least


@dataclass(frozen=True, kw_only=True)
class TrueAverage:
    """f itself: the sum over its own weight, however small. Only to compare with.

    Reference: McMahan et al. 2018, Fig. 5.
    """

    expected_groups: float

    @property
    def is_bounded(self) -> bool:
        """A user who is almost alone decides the average."""
        return False

    def scale(self, weight: float) -> float:
        """q K / sum_k w_k; zero if there is nobody."""
        return self.expected_groups / weight if weight > 0 else 0.0

    def sensitivity(self, bound: float) -> float:
        """The bound, as for f_f, so that the noise has a size. Nothing is promised."""
        return bound
