"""Whose rows are whose: the map from users to rows that samplers draw from.

A row is one training sequence; it has one owner here. The index holds numbers only, never text, so
everything built on it (sampling, accounting) can be read and tested without data. The index itself
is secret: which user owns how many rows is private.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]

# A token with this label is not predicted, so it adds nothing to any loss.
IGNORED_LABEL = -100


@dataclass(frozen=True, kw_only=True)
class UserIndex:
    """Rows of user i are `rows[indptr[i]:indptr[i + 1]]`."""

    indptr: Rows
    rows: Rows

    def __post_init__(self) -> None:
        assert self.indptr.ndim == 1
        assert self.indptr[0] == 0
        assert self.indptr[-1] == len(self.rows)

    def __repr__(self) -> str:
        return "UserIndex(<secret>)"

    @property
    def num_users(self) -> int:
        """The realised number of users: secret, unlike the public one of a plan."""
        return len(self.indptr) - 1

    @property
    def num_rows(self) -> int:
        """The realised number of rows: secret."""
        return len(self.rows)

    def rows_of(self, user: int) -> Rows:
        """The rows of one user."""
        return self.rows[self.indptr[user] : self.indptr[user + 1]]

    @staticmethod
    def from_owners(owners: Iterable[Hashable]) -> UserIndex:
        """Index rows 0, 1, 2, ... whose owners are given in order; users number by appearance.

        >>> index = UserIndex.from_owners(["ann", "bob", "ann"])
        >>> [index.rows_of(user).tolist() for user in range(index.num_users)]
        [[0, 2], [1]]
        """
        numbers: dict[Hashable, int] = {}
        owner_of_row = [numbers.setdefault(owner, len(numbers)) for owner in owners]
        return UserIndex.from_owner_numbers(
            np.asarray(owner_of_row, dtype=np.int64), num_users=len(numbers)
        )

    @staticmethod
    def from_owner_numbers(owner_of_row: Rows, *, num_users: int) -> UserIndex:
        """Index rows whose owner numbers (0 to `num_users` - 1) are given in order."""
        counts = np.bincount(owner_of_row, minlength=num_users)
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return UserIndex(
            indptr=indptr, rows=np.argsort(owner_of_row, kind="stable").astype(np.int64)
        )
