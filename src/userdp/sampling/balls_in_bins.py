"""Balls in bins: each user has one bin for the whole run, and the bins take turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from userdp.index import UserIndex
from userdp.sampling.cohort import Cohort
from userdp.sampling.contract import SAMPLERS, PublicNumbers, Sampler, check_at_least_one
from userdp.sampling.dealt import one_place_each
from userdp.sampling.draws import rows_of_users
from userdp.streams import Streams
from userdp.units import SamplingUnit


@SAMPLERS.register
@dataclass(frozen=True, kw_only=True)
class BallsInBins(Sampler):
    """Each user is in one of `bins` bins, all equally likely; step t takes bin t mod `bins`.

    Users are dealt independently and once. A user's steps are then exactly `bins` apart, which is
    the separation that correlated noise needs.
    Reference: Chua et al. 2025, Balls-and-Bins Sampling for DP-SGD (arXiv 2412.16802).
    """

    name: ClassVar[str] = "balls-in-bins"
    unit: ClassVar[SamplingUnit] = SamplingUnit.USER
    is_dealt: ClassVar[bool] = True
    bins: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one("bins", self.bins)

    @classmethod
    def configured(cls, public: PublicNumbers, **own: Any) -> Self:
        """As many bins as expected cohorts make up all users."""
        return cls(bins=rounds_of(public), group_size=public.group_size)

    def draw(self, index: UserIndex, step: int, streams: Streams) -> Cohort:
        """One group per user in the bin whose turn it is."""
        dealt = one_place_each(streams, 0, num_users=index.num_users, places=self.bins)
        users = dealt.at(step % self.bins)
        return rows_of_users(index, users, self.group_size, streams.rng(step))

    @property
    def words(self) -> str:
        """Who takes part in a step."""
        return (
            f"users dealt into {self.bins} bins at random once, one bin a step in turn, at most "
            f"{self.group_size} records a user and step"
        )


def rounds_of(public: PublicNumbers) -> int:
    """How many steps of the expected cohort size it takes for everybody to take part once."""
    return max(1, round(public.num_users / public.expected_groups))
