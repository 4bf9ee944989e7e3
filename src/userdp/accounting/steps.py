"""The kinds of steps that our own accountant prices, and how an event becomes a list of them.

A step is one pair of outputs, or it reveals publicly which of several pairs it is (`branches`).
What the adjacency changes is decided here, and nowhere else:

  * add-remove and zero-out compare a user who is there with nobody (`Mixture`);
  * replace compares a user with another one who pulls the other way (`Exchanged`). Without sampling
    that is a Gaussian, or Laplace, mechanism at twice the distance;
  * with a fixed graph (Ganesh et al. 2025, Def. 2.1) the same records are drawn on both sides, and
    what they say is zeroed out or replaced. Their coins do not look at what they say, so the pairs
    are those of zero-out and of replace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from dp_accounting import dp_event

from userdp.accounting import correlated_bins
from userdp.accounting.allocation import Allocated, blocks
from userdp.accounting.events import DpEvent
from userdp.accounting.exchange import Exchange
from userdp.accounting.laplace import Laplace
from userdp.accounting.normal import UNIT_ROUNDOFF
from userdp.accounting.own_events import (
    BallsInBinsBandedDpEvent,
    DiscreteGaussianDpEvent,
    RandomAllocationGaussianDpEvent,
    WithoutReplacementGaussianDpEvent,
)
from userdp.accounting.pair import MixturePair, Outputs
from userdp.accounting.special import Floats, binomial_tail
from userdp.accounting.without_replacement import Drawn
from userdp.units import Adjacency

# Less noise than the first counts as none: epsilon would be above 10^11. More noise than the second
# is priced as the second, which is sound because less noise never costs less.
_LEAST_NOISE, _MOST_NOISE = 1e-6, 1e9

# The tails of a binomial are trusted to this relative error, and are raised by it.
_TAIL_ERROR = 1e-9


class Step(Protocol):
    """One kind of step, in public numbers only; `count` is how often it is taken."""

    @property
    def count(self) -> int:
        """How often the step is taken."""
        ...

    def branches(self, tail: float) -> Sequence[tuple[float, Outputs]]:
        """The pairs that the step may be, with their chances; at most `tail` of each is cut off."""
        ...


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Gaussian noise, and a user who moves the sum by `shifts` with probabilities `weights`."""

    noise: float
    shifts: Floats
    weights: Floats
    count: int

    @property
    def is_gaussian(self) -> bool:
        """Whether the user always moves the sum by the same amount: no sampling."""
        return len(self.shifts) == 1

    def branches(self, tail: float) -> Sequence[tuple[float, Outputs]]:
        """A single pair."""
        return [(1.0, MixturePair.of(self.noise, self.shifts, self.weights, tail=tail))]


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """A `Mixture` in which the user is replaced by one who moves the sum as far the other way."""

    noise: float
    shifts: Floats
    weights: Floats
    count: int

    def branches(self, tail: float) -> Sequence[tuple[float, Outputs]]:
        """A single pair."""
        return [(1.0, Exchange.of(self.noise, self.shifts, self.weights, tail=tail))]


@dataclass(frozen=True, kw_only=True)
class LaplaceNoise:
    """Laplace noise of scale `noise`, and a user who moves the sum by 1 with chance `rate`."""

    noise: float
    rate: float
    count: int

    def branches(self, tail: float) -> Sequence[tuple[float, Outputs]]:
        """A single pair; nothing is cut off."""
        del tail
        return [(1.0, Laplace(noise=self.noise, rate=self.rate))]


@dataclass(frozen=True, kw_only=True)
class Capped:
    """A cohort cut to a cap: with chance `crowded` the user, if drawn, pushes another one out.

    The price assumes that the step reveals whether the cohort was full, which only helps the
    attacker. In a full cohort the user is there with probability `rate`, in the place of somebody
    else. That is a replacement.
    Reference: Ganesh 2025 (arXiv 2508.15089), as in `dp_accounting`.
    """

    crowded: float
    rate: float
    usual: Mixture | Exchanged

    @property
    def count(self) -> int:
        """How often the step is taken."""
        return self.usual.count

    def branches(self, tail: float) -> Sequence[tuple[float, Outputs]]:
        """A full cohort, and one that is not."""
        # Exchanging two users who are both in the cohort moves the sum by two clip norms.
        full = Exchange.of(self.usual.noise / 2, *_zero_or(1.0, self.rate), tail=tail)
        return [
            (self.crowded, full),
            *((1 - self.crowded, one) for _, one in self.usual.branches(tail)),
        ]


def chance_of_moving(mechanism: Sequence[Step]) -> float:
    """An upper bound on the chance that the user ever changes an output.

    If the coins leave the user out of every step, both neighbours give the same output. So the
    mechanism is (0, chance)-DP, whatever its noise. The steps toss their coins independently, so
    the chance is 1 - prod_i (1 - m_i)^T_i, where m_i is the chance in one step of kind i. For a
    single sampled step, it is exactly the chance that was given.

    >>> event = dp_event.PoissonSampledDpEvent(1e-4, dp_event.GaussianDpEvent(1.0))
    >>> chance_of_moving(of(event, Adjacency.ADD_REMOVE, 1) or [])
    0.0001
    >>> round(chance_of_moving(of(event, Adjacency.ADD_REMOVE, 10) or []), 8)
    0.00099955
    """
    moved = [(_chance_in_one(step), step.count) for step in mechanism]
    if any(chance >= 1 for chance, _ in moved):
        return 1.0
    match moved:
        case [(chance, 1)]:
            return chance
        case _:
            log_never = math.fsum(count * math.log1p(-chance) for chance, count in moved)
            # Each function and product is within a few units of its last digit.
            return min(1.0, -math.expm1(log_never) * (1 + 16 * UNIT_ROUNDOFF))


def _chance_in_one(step: Step) -> float:
    """A bound on the chance that the user changes the output of one step."""
    match step:
        case Mixture() | Exchanged() if len(step.shifts) == 2 and step.shifts[0] == 0:
            # This chance was given. Only weights that were computed have an error.
            total = math.fsum(step.weights)
            chance = float(step.weights[1])
            return chance if abs(total - 1) <= 2 * UNIT_ROUNDOFF else _raised(chance / total)
        case Mixture() | Exchanged():
            moving = math.fsum(step.weights[step.shifts > 0])
            return _raised(moving / math.fsum(step.weights))
        case LaplaceNoise() | Drawn():
            return step.rate
        case Capped(usual=usual):
            return _raised(step.crowded * step.rate + _chance_in_one(usual))
        case _:
            return 1.0


def _raised(chance: float) -> float:
    """A computed chance, made larger by its error."""
    return min(1.0, chance * (1 + _TAIL_ERROR))


def of(event: DpEvent, adjacency: Adjacency, count: int = 1) -> list[Step] | None:
    """The event as steps that we can price under this adjacency; None if we cannot.

    >>> event = dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(2.0), 3)
    >>> [step.count for step in of(event, Adjacency.ADD_REMOVE) or []]
    [3]
    """
    replaces = adjacency.replaces
    match event:
        case dp_event.NoOpDpEvent():
            return []
        case dp_event.SelfComposedDpEvent():
            return of(event.event, adjacency, count * event.count) if event.count else []
        case dp_event.ComposedDpEvent():
            parts = [of(part, adjacency, count) for part in event.events]
            if any(part is None for part in parts):
                return None
            return [step for part in parts if part is not None for step in part]
        case dp_event.GaussianDpEvent() if event.noise_multiplier > 0:
            return _moved(event.noise_multiplier, [1.0], [1.0], count, replaces)
        case dp_event.LaplaceDpEvent() if event.noise_multiplier > 0:
            noise = min(event.noise_multiplier, _MOST_NOISE) / (2 if replaces else 1)
            return [LaplaceNoise(noise=noise, rate=1.0, count=count)]
        case dp_event.PoissonSampledDpEvent():
            return _sampled(event, adjacency, count)
        case dp_event.MixtureOfGaussiansDpEvent() if event.standard_deviation > 0:
            return _moved(
                event.standard_deviation,
                event.sensitivities,
                event.sampling_probs,
                count,
                replaces,
            )
        case dp_event.TruncatedSubsampledGaussianDpEvent() if event.noise_multiplier > 0:
            return _capped(event, count, replaces)
        case RandomAllocationGaussianDpEvent() if event.noise_multiplier > 0 and not replaces:
            return _allocated(event, count)
        case WithoutReplacementGaussianDpEvent() if event.noise_multiplier > 0:
            return _drawn(event, count, replaces)
        case BallsInBinsBandedDpEvent() if event.noise_multiplier > 0 and not replaces:
            return of(correlated_bins.proven(event)[0], adjacency, count)
        case _:
            return None


def has_no_privacy(event: DpEvent) -> bool:
    """Whether a part of the event releases something without noise, or with next to none.

    >>> has_no_privacy(dp_event.ComposedDpEvent([dp_event.GaussianDpEvent(0.0)]))
    True
    """
    match event:
        case dp_event.NonPrivateDpEvent():
            return True
        case dp_event.ComposedDpEvent():
            return any(has_no_privacy(part) for part in event.events)
        case dp_event.SelfComposedDpEvent():
            return event.count > 0 and has_no_privacy(event.event)
        case dp_event.PoissonSampledDpEvent():
            return event.sampling_probability > 0 and has_no_privacy(event.event)
        case dp_event.GaussianDpEvent() | dp_event.LaplaceDpEvent():
            return not event.noise_multiplier >= _LEAST_NOISE
        case (
            dp_event.TruncatedSubsampledGaussianDpEvent()
            | RandomAllocationGaussianDpEvent()
            | WithoutReplacementGaussianDpEvent()
            | BallsInBinsBandedDpEvent()
            | DiscreteGaussianDpEvent()
        ):
            return not event.noise_multiplier >= _LEAST_NOISE
        case dp_event.MixtureOfGaussiansDpEvent():
            return not event.standard_deviation >= _LEAST_NOISE
        case _:
            return False


def _sampled(
    event: dp_event.PoissonSampledDpEvent, adjacency: Adjacency, count: int
) -> list[Step] | None:
    rate, inner = event.sampling_probability, event.event
    if not 0 < rate < 1:
        # At rate 1 nothing is sampled. At rate 0 nobody is ever there, which costs nothing.
        return of(inner, adjacency, count) if rate >= 1 else []
    replaces = adjacency.replaces
    match inner:
        case dp_event.GaussianDpEvent() if inner.noise_multiplier > 0:
            return _moved(inner.noise_multiplier, [0.0, 1.0], [1 - rate, rate], count, replaces)
        case dp_event.LaplaceDpEvent() if inner.noise_multiplier > 0 and not replaces:
            noise = min(inner.noise_multiplier, _MOST_NOISE)
            return [LaplaceNoise(noise=noise, rate=rate, count=count)]
        case _:
            return None


def _moved(
    noise: float, shifts: Sequence[float], weights: Sequence[float], count: int, replaces: bool
) -> list[Step]:
    """A user who moves the sum by `shifts`, compared with nobody or with another user."""
    noise = min(noise, _MOST_NOISE)
    # Only the length of a move matters, as `exchange` proves.
    moves = np.abs(np.asarray(shifts, dtype=np.float64))
    chances = np.asarray(weights, dtype=np.float64)
    kept = chances > 0
    moves, chances = moves[kept], chances[kept]
    if not np.any(moves > 0):
        return []
    if len(moves) == 1:
        # Opposite moves of known size are a Gaussian mechanism at twice the distance.
        moves = 2 * moves if replaces else moves
        return [Mixture(noise=noise, shifts=moves, weights=chances, count=count)]
    kind = Exchanged if replaces else Mixture
    return [kind(noise=noise, shifts=moves, weights=chances, count=count)]


def _allocated(event: RandomAllocationGaussianDpEvent, count: int) -> list[Step]:
    """One step for each block, as `allocation` proves; a block of one step is not sampled."""
    noise, found = event.noise_multiplier, list[Step]()
    for places, number in blocks(event.steps, event.participations):
        if places == 1:
            found += _moved(noise, [1.0], [1.0], number * count, replaces=False)
        else:
            found.append(Allocated(noise=noise, places=places, count=number * count))
    return found


def _drawn(event: WithoutReplacementGaussianDpEvent, count: int, replaces: bool) -> list[Step]:
    """One of the places that are drawn; if all are, nothing is left to chance."""
    noise = min(event.noise_multiplier, _MOST_NOISE)
    if event.cohort_size >= event.num_users:
        return _moved(noise, [1.0], [1.0], count, replaces)
    # The quotient is rounded. A larger rate never costs less.
    rate = event.cohort_size / event.num_users * (1 + 4 * UNIT_ROUNDOFF)
    return [Drawn(noise=noise, rate=rate, replaces=replaces, count=count)]


def _capped(
    event: dp_event.TruncatedSubsampledGaussianDpEvent, count: int, replaces: bool
) -> list[Step] | None:
    users, rate, cap = event.dataset_size, event.sampling_probability, event.truncated_batch_size
    if rate <= 0 or cap <= 0 or users <= 0:
        return []
    usual = _moved(event.noise_multiplier, [0.0, 1.0], [1 - rate, rate], count, replaces)
    # `full` is the chance that the others reach the cap. `kept` is the chance that the user, given
    # that, is drawn and is one of those who are kept.
    full = binomial_tail(cap - 1, users - 1, rate)
    if full == 0:
        return usual
    kept = binomial_tail(cap, users, rate) * cap / users / full
    (step,) = usual
    assert isinstance(step, Mixture | Exchanged)
    return [
        Capped(
            crowded=min(1.0, full * (1 + _TAIL_ERROR)),
            rate=min(1.0, max(kept, _TAIL_ERROR) * (1 + _TAIL_ERROR)),
            usual=step,
        )
    ]


def _zero_or(shift: float, chance: float) -> tuple[Floats, Floats]:
    """The shifts and weights of a move that is made with this chance."""
    if chance >= 1:
        return np.array([shift]), np.array([1.0])
    return np.array([0.0, shift]), np.array([1 - chance, chance])
