"""Steps with the pairs and losses from which a tilt and a grid are chosen.

This file stands between the kinds of steps (`steps`) and the bound (`search`). Everything here is
public.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from userdp.accounting.discretise import Atoms, Focus, discretise, revealed, tilted
from userdp.accounting.pair import Direction, Outputs, Quadrature
from userdp.accounting.special import Floats
from userdp.accounting.steps import Mixture, Step

# Cutting off tails may take this share of delta.
_TAIL_SHARE = 1e-8


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One of the pairs that a step may be, with its chance and the points of its loss."""

    chance: float
    pair: Outputs
    quadrature: Quadrature


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A kind of step, with the losses from which tilt and grid are chosen."""

    branches: tuple[Branch, ...]
    count: int

    @cached_property
    def losses(self) -> tuple[Floats, Floats]:
        """The losses of all branches, and the log of Q's mass at each."""
        return (
            np.concatenate([one.quadrature.loss for one in self.branches]),
            np.concatenate([one.quadrature.log_q + math.log(one.chance) for one in self.branches]),
        )

    def largest_loss(self, direction: Direction) -> float:
        """The largest finite loss of one step."""
        loss, _ = self.losses
        return float(loss.max()) if direction is Direction.REMOVE else -float(loss.min())

    def moments(self, direction: Direction, tilt: float) -> tuple[float, float, float]:
        """The log moment of all steps of this kind, and their tilted mean and variance."""
        loss, log_mass = tilted(*self.losses, direction, tilt)
        peak = float(log_mass.max())
        weight = np.exp(log_mass - peak)
        total = float(weight.sum())
        mean = float(weight @ loss) / total
        variance = float(weight @ (loss - mean) ** 2) / total
        return self.count * (peak + math.log(total)), self.count * mean, self.count * variance

    def capped(self, direction: Direction, cap: float) -> Prepared:
        """The same with losses above `cap` split between `cap` and infinity."""
        return Prepared(
            branches=tuple(
                Branch(
                    chance=one.chance,
                    pair=one.pair,
                    quadrature=one.quadrature.capped(direction, cap),
                )
                for one in self.branches
            ),
            count=self.count,
        )

    def atoms(self, direction: Direction, focus: Focus) -> Atoms:
        """The loss of one step on the grid."""
        return revealed(
            [
                (
                    one.chance,
                    discretise(one.pair, one.quadrature, direction, count=self.count, focus=focus),
                )
                for one in self.branches
            ]
        )


def prepare(mechanism: Sequence[Step], delta: float) -> list[Prepared]:
    """The mechanism's steps. Tails that are small beside `delta` are cut off."""
    kinds = joined(mechanism)
    steps = sum(step.count for step in kinds)
    tail = max(_TAIL_SHARE * delta / steps, 1e-290) / 2
    return [
        Prepared(
            branches=tuple(
                Branch(chance=chance, pair=pair, quadrature=pair.quadrature(tail))
                for chance, pair in step.branches(tail)
                if chance > 0
            ),
            count=step.count,
        )
        for step in kinds
    ]


def directions(prepared: Sequence[Prepared]) -> tuple[Direction, ...]:
    """The directions to price: one of them if both cost the same, else both."""
    if all(one.pair.is_symmetric for step in prepared for one in step.branches):
        return (Direction.REMOVE,)
    return (Direction.REMOVE, Direction.ADD)


def joined(mechanism: Sequence[Step]) -> list[Step]:
    """The same mechanism, with all steps without sampling as one: Gaussians compose to a Gaussian.

    >>> one = np.array([1.0])
    >>> joined([Mixture(noise=4.0, shifts=one, weights=one, count=4)])[0].noise
    2.0
    """
    unsampled = [one for one in mechanism if isinstance(one, Mixture) and one.is_gaussian]
    # By identity: steps hold arrays, which have no one answer to whether they are equal.
    others = [one for one in mechanism if not any(one is joint for joint in unsampled)]
    squares = sum(one.count * (float(one.shifts[0]) / one.noise) ** 2 for one in unsampled)
    if squares == 0:
        return others
    one = np.array([1.0])
    whole = Mixture(noise=1 / math.sqrt(squares), shifts=one, weights=one, count=1)
    return [*others, whole]
