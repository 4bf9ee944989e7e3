"""Cyclic Poisson sampling: users are dealt into parts once, and each step samples from one part.

A user can take part only every so many steps as there are parts. Correlated noise with as many
bands needs that, and independent noise gains nothing by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np

from userdp.errors import InputError
from userdp.index import UserIndex
from userdp.sampling.cohort import Cohort
from userdp.sampling.contract import (
    SAMPLERS,
    PublicNumbers,
    Sampler,
    check_at_least_one,
    check_probability,
)
from userdp.sampling.dealt import DEALING, Dealt, by_place, one_place_each, remembered
from userdp.sampling.draws import at_most_each, check_limited, poisson, rows_of_users
from userdp.streams import Streams
from userdp.units import SamplingUnit

_HINT = {"hint": "It is the number of parts that users are dealt into."}


@SAMPLERS.register
@dataclass(frozen=True, kw_only=True)
class CyclicPoissonUsers(Sampler):
    """Each user is in one of b parts; step t draws users of part t mod b, each by its own coin.

    b = `parts`, q = `user_sampling_prob` is the coin of the users whose turn it is. It is b times
    what it would be over all users.
    Reference: Choquette-Choo et al. 2024, Alg. 2 and Thm. 4.
    """

    name: ClassVar[str] = "cyclic-poisson"
    unit: ClassVar[SamplingUnit] = SamplingUnit.USER
    is_dealt: ClassVar[bool] = True
    keys: ClassVar[Mapping[str, str]] = {"parts": "parts"}
    user_sampling_prob: float
    parts: int = field(metadata=_HINT)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one("parts", self.parts)
        check_probability("user_sampling_prob", self.user_sampling_prob)

    @classmethod
    def configured(cls, public: PublicNumbers, **own: Any) -> Self:
        """q is the expected cohort size over the users of one part."""
        rate = _rate(public.expected_groups, public.num_users, "users", own["parts"])
        return cls(user_sampling_prob=rate, group_size=public.group_size, **own)

    def at_rate(self, factor: float) -> CyclicPoissonUsers:
        """Every user with another coin, in as many parts."""
        return replace(self, user_sampling_prob=self.user_sampling_prob * factor)

    def draw(self, index: UserIndex, step: int, streams: Streams) -> Cohort:
        """One group per sampled user of the part whose turn it is."""
        dealt = one_place_each(streams, 0, num_users=index.num_users, places=self.parts)
        rng = streams.rng(step)
        members = dealt.at(step % self.parts)
        users = members[poisson(len(members), self.user_sampling_prob, rng)]
        return rows_of_users(index, users, self.group_size, rng)

    @property
    def words(self) -> str:
        """Who takes part in a step."""
        return (
            f"Poisson sampling of users from one of {self.parts} parts in turn, rate="
            f"{self.user_sampling_prob:.6g} within the part, at most {self.group_size} records a "
            "user and step"
        )


@SAMPLERS.register
@dataclass(frozen=True, kw_only=True)
class CyclicPoissonRecords(Sampler):
    """As `CyclicPoissonUsers`, but each of a user's at most G rows has its own coin.

    b = `parts`, p = `record_sampling_prob`, G = `group_size`. All rows of a user are in the user's
    part. So when it is the part's turn, up to G of them may take part in the same step.
    """

    name: ClassVar[str] = "cyclic-poisson"
    unit: ClassVar[SamplingUnit] = SamplingUnit.RECORD
    is_dealt: ClassVar[bool] = True
    keys: ClassVar[Mapping[str, str]] = {"parts": "parts"}
    record_sampling_prob: float
    parts: int = field(metadata=_HINT)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one("parts", self.parts)
        check_probability("record_sampling_prob", self.record_sampling_prob)

    @classmethod
    def configured(cls, public: PublicNumbers, **own: Any) -> Self:
        """p is the expected batch size over the records of one part."""
        rate = _rate(public.expected_groups, public.num_records, "records", own["parts"])
        return cls(record_sampling_prob=rate, group_size=public.group_size, **own)

    def of_one_record(self) -> CyclicPoissonRecords:
        """Every row has its own coin."""
        return replace(self, group_size=1)

    def at_rate(self, factor: float) -> CyclicPoissonRecords:
        """Every row with another coin, in as many parts."""
        return replace(self, record_sampling_prob=self.record_sampling_prob * factor)

    def limit_contributions(self, index: UserIndex, streams: Streams) -> UserIndex:
        """At most G rows of each user, uniformly without replacement."""
        return at_most_each(index, self.group_size, streams)

    def draw(self, index: UserIndex, step: int, streams: Streams) -> Cohort:
        """One group per sampled row of the users whose turn it is."""
        check_limited(index, self.group_size)
        members = self._rows_by_part(index, streams).at(step % self.parts)
        sampled = poisson(len(members), self.record_sampling_prob, streams.rng(step))
        return Cohort.of_single_rows(index.rows[members[sampled]])

    def _rows_by_part(self, index: UserIndex, streams: Streams) -> Dealt:
        """The places of `index.rows` whose owners are in each part."""

        def deal() -> Dealt:
            part_of_user = streams.rng(0, DEALING).integers(self.parts, size=index.num_users)
            part_of_row = np.repeat(part_of_user, np.diff(index.indptr))
            return replace(by_place(part_of_row, self.parts), of=index)

        return remembered(("rows", streams.key(0, DEALING), self.parts, id(index)), deal)

    @property
    def words(self) -> str:
        """Which records take part in a step."""
        return (
            f"Poisson sampling of records from one of {self.parts} parts of the users in turn, "
            f"rate={self.record_sampling_prob:.6g} within the part, at most {self.group_size} "
            "records a user"
        )


def _rate(expected: float, total: int, what: str, parts: int) -> float:
    """The coin within a part, from the expected number in a step."""
    check_at_least_one("parts", parts)
    rate = parts * expected / total
    if rate > 1:
        raise InputError(
            f"parts={parts}: a part has {total / parts:g} {what}, and {expected:g} are expected in "
            "a step. Lower parts, or expect fewer."
        )
    return rate
