"""Cohorts of a fixed size, drawn without replacement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from userdp.errors import InputError
from userdp.index import UserIndex
from userdp.sampling.cohort import Cohort
from userdp.sampling.contract import (
    SAMPLERS,
    PlaceSampler,
    PublicNumbers,
    check_at_least_one,
)
from userdp.sampling.draws import equally_many, rows_of_users
from userdp.streams import Streams
from userdp.units import SamplingUnit


@SAMPLERS.register
@dataclass(frozen=True, kw_only=True)
class WithoutReplacement(PlaceSampler):
    """Each step takes exactly `cohort_size` of `num_users` places, all such sets equally likely."""

    name: ClassVar[str] = "without-replacement"
    unit: ClassVar[SamplingUnit] = SamplingUnit.USER
    cohort_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one("cohort_size", self.cohort_size)
        if self.cohort_size > self.num_users:
            raise InputError(
                f"cohort_size={self.cohort_size:,} of {self.num_users:,} users: nobody takes part "
                "twice in a step. Lower the cohort size, or use more users."
            )

    @classmethod
    def configured(cls, public: PublicNumbers, **own: Any) -> Self:
        """The cohort size is the expected one, as a whole number."""
        return cls(
            cohort_size=round(public.expected_groups),
            num_users=public.num_users,
            group_size=public.group_size,
        )

    @classmethod
    def expected_groups(cls, public: PublicNumbers, **own: Any) -> float:
        """The cohort size."""
        return float(round(public.expected_groups))

    def draw(self, index: UserIndex, step: int, streams: Streams) -> Cohort:
        """One group per user at a place that is drawn."""
        self.check_users(index.num_users)
        rng = streams.rng(step)
        (places,) = equally_many(1, self.num_users, self.cohort_size, rng)
        return rows_of_users(index, places[places < index.num_users], self.group_size, rng)

    @property
    def words(self) -> str:
        """Who takes part in a step."""
        return (
            f"exactly {self.cohort_size} of {self.num_users} users a step, without replacement, at "
            f"most {self.group_size} records a user and step"
        )
