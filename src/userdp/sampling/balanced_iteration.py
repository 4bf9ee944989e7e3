"""Balanced iteration: in every round each user takes part once, at a step drawn afresh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from userdp.index import UserIndex
from userdp.sampling.balls_in_bins import rounds_of
from userdp.sampling.cohort import Cohort
from userdp.sampling.contract import SAMPLERS, PublicNumbers, Sampler, check_at_least_one
from userdp.sampling.dealt import one_place_each
from userdp.sampling.draws import rows_of_users
from userdp.streams import Streams
from userdp.units import SamplingUnit


@SAMPLERS.register
@dataclass(frozen=True, kw_only=True)
class BalancedIteration(Sampler):
    """In each round of `round_length` steps each user takes part once, all steps equally likely.

    A round is one random allocation of everybody, independent of the other rounds. A run may end
    in the middle of a round.
    Reference: Feldman and Shenfeld 2025 (arXiv 2502.08202), Sec. 2.
    """

    name: ClassVar[str] = "balanced-iteration"
    unit: ClassVar[SamplingUnit] = SamplingUnit.USER
    is_dealt: ClassVar[bool] = True
    round_length: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one("round_length", self.round_length)

    @classmethod
    def configured(cls, public: PublicNumbers, **own: Any) -> Self:
        """As many steps a round as expected cohorts make up all users."""
        return cls(round_length=rounds_of(public), group_size=public.group_size)

    def draw(self, index: UserIndex, step: int, streams: Streams) -> Cohort:
        """One group per user whose step of this round it is."""
        number, place = divmod(step, self.round_length)
        dealt = one_place_each(streams, number, num_users=index.num_users, places=self.round_length)
        return rows_of_users(index, dealt.at(place), self.group_size, streams.rng(step))

    @property
    def words(self) -> str:
        """Who takes part in a step."""
        return (
            f"each user once in every {self.round_length} steps, at a step drawn afresh each "
            f"round, at most {self.group_size} records a user and step"
        )
