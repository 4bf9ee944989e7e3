"""Shuffled batches: only to reproduce papers. They have no price here.

Papers often shuffle and then state the epsilon of Poisson sampling, which is not what ran (Chua et
al. 2024, arXiv 2403.17673). Such a run can be made here. Its plan carries the mark `AsIfPoisson`,
and the first line of every statement says that there is no guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from userdp.errors import InputError
from userdp.index import Rows, UserIndex
from userdp.sampling.cohort import Cohort
from userdp.sampling.contract import SAMPLERS, PublicNumbers, Sampler, check_at_least_one
from userdp.sampling.dealt import DEALING, Dealt, remembered
from userdp.sampling.draws import at_most_each, check_limited, rows_of_users
from userdp.sampling.poisson_records import PoissonRecords
from userdp.sampling.poisson_users import PoissonUsers
from userdp.streams import Streams
from userdp.units import SamplingUnit


@SAMPLERS.register
@dataclass(frozen=True, kw_only=True)
class Shuffled(Sampler):
    """Each epoch goes through a random permutation of the users, `cohort_size` a step.

    The last users of an epoch, too few for a whole cohort, are left out of it. `num_users` is the
    public number by which papers compute the rate.
    """

    name: ClassVar[str] = "shuffled"
    unit: ClassVar[SamplingUnit] = SamplingUnit.USER
    is_dealt: ClassVar[bool] = True
    cohort_size: int
    num_users: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.cohort_size, self.num_users)

    @classmethod
    def configured(cls, public: PublicNumbers, **own: Any) -> Self:
        """The cohort size is the expected one, as a whole number."""
        return cls(
            cohort_size=round(public.expected_groups),
            num_users=public.num_users,
            group_size=public.group_size,
        )

    @property
    def as_if(self) -> PoissonUsers:
        """Poisson sampling of as many users on average."""
        return PoissonUsers(
            user_sampling_prob=self.cohort_size / self.num_users, group_size=self.group_size
        )

    def draw(self, index: UserIndex, step: int, streams: Streams) -> Cohort:
        """One group per user of the next piece of the epoch's permutation."""
        users = _next_of(index.num_users, self.cohort_size, step, streams)
        return rows_of_users(index, users, self.group_size, streams.rng(step))

    @property
    def words(self) -> str:
        """Who takes part in a step."""
        return (
            f"shuffled users, {self.cohort_size} of {self.num_users} a step, at most "
            f"{self.group_size} records a user and step"
        )


@SAMPLERS.register
@dataclass(frozen=True, kw_only=True)
class ShuffledRecords(Sampler):
    """As `Shuffled`, but records are permuted, and `batch_size` of them are in a step."""

    name: ClassVar[str] = "shuffled"
    unit: ClassVar[SamplingUnit] = SamplingUnit.RECORD
    is_dealt: ClassVar[bool] = True
    batch_size: int
    num_records: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.batch_size, self.num_records)

    @classmethod
    def configured(cls, public: PublicNumbers, **own: Any) -> Self:
        """The batch size is the expected one, as a whole number."""
        return cls(
            batch_size=round(public.expected_groups),
            num_records=public.num_records,
            group_size=public.group_size,
        )

    @property
    def as_if(self) -> PoissonRecords:
        """Poisson sampling of as many records on average."""
        return PoissonRecords(
            record_sampling_prob=self.batch_size / self.num_records, group_size=self.group_size
        )

    def limit_contributions(self, index: UserIndex, streams: Streams) -> UserIndex:
        """At most G rows of each user, uniformly without replacement."""
        return at_most_each(index, self.group_size, streams)

    def draw(self, index: UserIndex, step: int, streams: Streams) -> Cohort:
        """One group per row of the next piece of the epoch's permutation."""
        check_limited(index, self.group_size)
        return Cohort.of_single_rows(
            index.rows[_next_of(index.num_rows, self.batch_size, step, streams)]
        )

    @property
    def words(self) -> str:
        """Which records take part in a step."""
        return (
            f"shuffled records, {self.batch_size} of {self.num_records} a step, at most "
            f"{self.group_size} records a user"
        )


def _check(size: int, total: int) -> None:
    check_at_least_one("cohort_size", size)
    if size > total:
        raise InputError(f"a step of {size:,} out of {total:,}: lower its size.")


def _next_of(count: int, size: int, step: int, streams: Streams) -> Rows:
    """The numbers of one step: the next `size` of the permutation of its epoch."""
    epoch, place = divmod(step, max(1, count // size))

    def shuffle() -> Dealt:
        order = streams.rng(epoch, DEALING).permutation(count)
        return Dealt(indptr=np.array([0, count]), cards=order)

    found = remembered(("shuffled", streams.key(epoch, DEALING), count), shuffle)
    return found.cards[place * size : (place + 1) * size].astype(np.int64)
