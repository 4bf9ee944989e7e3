"""Random allocation: a user takes part in exactly k of T steps, a uniformly random subset.

The worst pair is Q = N(0, sigma^2 I_T) against P = the mean of N(1_S, sigma^2 I_T) over all subsets
S of k steps. The proof has four parts.

  * **Steps may be adaptive.** Let x be a draw from P or from Q. Whoever knows everybody's data can
    make the run's outputs from x, without knowing S: if the user would move step s by a vector u of
    norm r <= 1, which may depend on earlier outputs, then r x_s + sqrt(1 - r^2) N(0, sigma^2) is
    the noised movement along u, and the other coordinates are noise. The other users are allocated
    independently of this one. So the run is a post-processing of x.
  * **k blocks.** A random subset can be drawn in two stages: divide the steps into k blocks of
    given sizes at random, and draw one step of each block. By symmetry every subset is equally
    likely. An attacker who is also told the blocks sees k independent pairs, "one of t steps" with
    t = T / k rounded down or up. So the k-fold composition of these pairs dominates (Feldman and
    Shenfeld 2025, arXiv 2502.08202). T mod k blocks are of the larger size.
  * **One of t.** The likelihood ratio is R = (1/t) sum_i Y_i, where the Y_i = exp(z_i / sigma -
    1 / (2 sigma^2)) are independent under Q. `averages` has its law.
  * **Balls in bins.** If the user is in the same place of all E rounds, the ratio of place i is
    exp(sum_e x_ie / sigma^2 - E / (2 sigma^2)). It depends on the sum over rounds only, so that sum
    is sufficient. It is N(0, E sigma^2) or N(E, E sigma^2), which is the pair above at sigma /
    sqrt(E). A run that ends within a round tells less than the whole round.

Removing a user, and counting its updates as zero, compare the same two outputs. For replacing a
user no pair is proven here, so there is no price.
Symbols: sigma = `noise`, t = `places`. Everything here is public.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from userdp.accounting import averages
from userdp.accounting.pair import MixturePair, Outputs
from userdp.accounting.special import normal_quantile

# With more noise than this, the price is that of this much noise: epsilon is below 1e-6 anyway.
_MOST_NOISE = 1e6


@dataclass(frozen=True, kw_only=True)
class Allocated:
    """A user who moves one of `places` Gaussian outputs by 1, and nobody knows which."""

    noise: float
    places: int
    count: int

    def branches(self, tail: float) -> Sequence[tuple[float, Outputs]]:
        """A single pair."""
        if 1 / self.noise - normal_quantile(tail) > averages.FARTHEST:
            # With so little noise masses underflow. An attacker who is told the place sees a
            # Gaussian mechanism, which costs hardly more there.
            one = np.array([1.0])
            return [(1.0, MixturePair.of(self.noise, one, one, tail=tail))]
        noise = min(self.noise, _MOST_NOISE)
        return [(1.0, averages.of_gaussians(noise, self.places, tail).pair())]


def blocks(steps: int, participations: int) -> list[tuple[int, int]]:
    """The sizes of the blocks, and how many there are of each.

    >>> blocks(100, 7)
    [(14, 5), (15, 2)]
    """
    size, larger = divmod(steps, participations)
    sizes = [(size, participations - larger), (size + 1, larger)]
    return [(size, number) for size, number in sizes if number]
