"""Events of mechanisms that `dp_accounting` does not know.

Each has a price in `steps`, `added` or `whole_orders`.

An event holds public numbers only, which a ledger can write down. Once an event is released, its
meaning never changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from dp_accounting.dp_event import DpEvent

from userdp.errors import InputError


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

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.participations <= self.steps:
            raise InputError(
                f"participations={self.participations} of {self.steps} steps: give 1 to "
                f"{self.steps}."
            )


@attrs.frozen(eq=True)
class WithoutReplacementGaussianDpEvent(DpEvent):
    """One Gaussian step that takes exactly `cohort_size` of `num_users` places, drawn at random."""

    num_users: int
    cohort_size: int
    noise_multiplier: float

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.cohort_size <= self.num_users:
            raise InputError(
                f"cohort_size={self.cohort_size} of {self.num_users} users: give 1 to "
                f"{self.num_users}."
            )


# Products of vectors are rounded up when they are computed.
_ROOM = 1 + 1e-9


def _numbers(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


@attrs.frozen(eq=True)
class BallsInBinsBandedDpEvent(DpEvent):
    """A user has one of `bins` bins for good, and noise is correlated over the steps.

    `gram` holds the inner products of what bins add at distance 0, 1, ... around the circle.
    """

    bins: int
    gram: tuple[float, ...] = attrs.field(converter=_numbers)
    noise_multiplier: float

    def __attrs_post_init__(self) -> None:
        most = self.bins // 2 + 1
        is_sized = 1 <= len(self.gram) <= most
        # No product of two vectors is above the longer one's length squared, but for rounding.
        if not (is_sized and min(self.gram) >= 0 < self.gram[0] * _ROOM >= max(self.gram)):
            raise InputError(
                f"gram has {len(self.gram)} numbers for {self.bins} bins: give 1 to {most}, none "
                "of them negative and none above the first."
            )


@attrs.frozen(eq=True)
class DiscreteGaussianDpEvent(DpEvent):
    """Discrete Gaussian noise on integers, `noise_multiplier` times as large as what a user moves.

    What a user moves is counted in the L2 norm of the integers, rounding included. It may be inside
    a `PoissonSampledDpEvent`. `whole_orders` prices it.
    """

    noise_multiplier: float
