"""Events of mechanisms that `dp_accounting` does not know. Each has a price in `steps`, `added` or
`whole_orders`.

An event holds public numbers only, which a ledger can write down. Once an event is released, its
meaning never changes.
"""

from __future__ import annotations

import attrs
from dp_accounting.dp_event import DpEvent


@attrs.frozen(eq=True)
class EpsilonDeltaDpEvent(DpEvent):
    """A mechanism known by one (epsilon, delta) only. `added` prices it with others."""

    epsilon: float
    delta: float


@attrs.frozen(eq=True)
class RandomAllocationGaussianDpEvent(DpEvent):
    """A user takes part in exactly `participations` of `steps` Gaussian steps, a random subset."""

    steps: int
    participations: int
    noise_multiplier: float


@attrs.frozen(eq=True)
class DiscreteGaussianDpEvent(DpEvent):
    """Discrete Gaussian noise on integers, `noise_multiplier` times as large as what a user moves.

    What a user moves is counted in the L2 norm of the integers, rounding included. It may be inside
    a `PoissonSampledDpEvent`. `whole_orders` prices it.
    """

    noise_multiplier: float
