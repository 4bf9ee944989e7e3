"""Who takes part in a step: Poisson sampling of users (ULS) or of records (ELS).

Public: the sampling probability and the group size. They are all the accountant sees, and all it
may see. Secret: every `Cohort`, its size included.

Reference: Charles et al. 2024, Alg. 1 (records) and Alg. 2 (users); McMahan et al. 2018, Sec. 2 A).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from userdp.errors import InputError
from userdp.index import Rows, UserIndex


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """The groups drawn at one step; each group's rows give one update. Secret: never logged."""

    indptr: Rows
    rows: Rows

    def __repr__(self) -> str:
        return "Cohort(<secret>)"

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def __iter__(self) -> Iterator[Rows]:
        for start, stop in zip(self.indptr[:-1], self.indptr[1:], strict=True):
            yield self.rows[start:stop]

    @staticmethod
    def of(groups: list[Rows]) -> Cohort:
        """A cohort of the given groups."""
        sizes = np.fromiter((len(group) for group in groups), dtype=np.int64, count=len(groups))
        rows = np.concatenate(groups) if groups else np.empty(0, dtype=np.int64)
        return Cohort(indptr=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), rows=rows)


class Sampler(Protocol):
    """Public parameters, and the draw they stand for."""

    @property
    def group_size(self) -> int:
        """The most rows of one user that can enter one step's groups (ULS) or the data (ELS)."""
        ...

    def limit_contributions(self, index: UserIndex, rng: np.random.Generator) -> UserIndex:
        """The rows that take part at all, chosen once before training."""
        ...

    def draw(self, index: UserIndex, rng: np.random.Generator) -> Cohort:
        """One step's cohort, independent of every other step's."""
        ...


@dataclass(frozen=True, kw_only=True)
class PoissonUsers:
    """Each user takes part with probability q, with at most G rows drawn afresh (ULS).

    q = `user_sampling_prob`, G = `group_size`.
    Reference: Charles et al. 2024, Alg. 2.

    >>> index = UserIndex.from_owners(["ann", "bob", "ann"])
    >>> sampler = PoissonUsers(user_sampling_prob=1.0, group_size=2)
    >>> [sorted(group.tolist()) for group in sampler.draw(index, np.random.default_rng(0))]
    [[0, 2], [1]]
    """

    user_sampling_prob: float
    group_size: int

    def __post_init__(self) -> None:
        _check_probability("user_sampling_prob", self.user_sampling_prob)
        _check_group_size(self.group_size)

    def limit_contributions(self, index: UserIndex, rng: np.random.Generator) -> UserIndex:
        """Every row: the group size limits each step, not the dataset."""
        return index

    def draw(self, index: UserIndex, rng: np.random.Generator) -> Cohort:
        """One group per sampled user."""
        sampled = np.flatnonzero(rng.random(index.num_users) < self.user_sampling_prob)
        return Cohort.of(
            [_at_most(index.rows_of(int(user)), self.group_size, rng) for user in sampled]
        )


@dataclass(frozen=True, kw_only=True)
class PoissonRecords:
    """Each of a user's at most G rows takes part by itself with probability p (ELS).

    p = `record_sampling_prob`, G = `group_size`. The G rows are chosen once, before training.
    Reference: Charles et al. 2024, Alg. 1.

    >>> index = UserIndex.from_owners(["ann", "bob", "ann"])
    >>> sampler = PoissonRecords(record_sampling_prob=1.0, group_size=2)
    >>> [group.tolist() for group in sampler.draw(index, np.random.default_rng(0))]
    [[0], [2], [1]]
    """

    record_sampling_prob: float
    group_size: int

    def __post_init__(self) -> None:
        _check_probability("record_sampling_prob", self.record_sampling_prob)
        _check_group_size(self.group_size)

    def limit_contributions(self, index: UserIndex, rng: np.random.Generator) -> UserIndex:
        """At most G rows of each user, uniformly without replacement (Alg. 1, first loop)."""
        kept = Cohort.of(
            [_at_most(index.rows_of(user), self.group_size, rng) for user in range(index.num_users)]
        )
        return UserIndex(indptr=kept.indptr, rows=kept.rows)

    def draw(self, index: UserIndex, rng: np.random.Generator) -> Cohort:
        """One group per sampled row."""
        widest = int(np.diff(index.indptr).max(initial=0))
        if widest > self.group_size:
            raise InputError(
                f"a user has {widest} rows and group_size={self.group_size}: the accounting would "
                "not cover that user. Call limit_contributions first."
            )
        sampled = index.rows[rng.random(index.num_rows) < self.record_sampling_prob]
        return Cohort(indptr=np.arange(len(sampled) + 1, dtype=np.int64), rows=sampled)


def _at_most(rows: Rows, count: int, rng: np.random.Generator) -> Rows:
    """`rows`, or `count` of them uniformly without replacement."""
    if len(rows) <= count:
        return rows
    return rng.choice(rows, size=count, replace=False, shuffle=False)


def _check_probability(name: str, value: float) -> None:
    if not 0.0 < value <= 1.0:
        raise InputError(f"{name}={value} is not a probability: give a value above 0, at most 1.")


def _check_group_size(value: int) -> None:
    if value < 1:
        raise InputError(f"group_size={value}: a group has at least one record. Use 1 or more.")
