"""The map from users to their rows, from which samplers draw.

A row is one training sequence. Here it has exactly one owner. The index holds numbers only, never
text. So everything built on it (sampling, accounting) can be read and tested without data. The
index itself is secret: which user owns how many rows is private.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from userdp.errors import InputError

Rows = NDArray[np.int64]

# A token with this label is not predicted, so it adds nothing to any loss.
IGNORED_LABEL = -100


def indptr_of(sizes: Sequence[int] | NDArray[Any]) -> Rows:
    """Where groups of these sizes begin, one after another, and where the last one ends.

    >>> indptr_of([2, 0, 3]).tolist()
    [0, 2, 2, 5]
    """
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def ranges(starts: NDArray[Any] | int, lengths: NDArray[Any]) -> Rows:
    """The numbers from each start on, as many as its length says, one range after another.

    >>> ranges(np.array([5, 0, 1]), np.array([2, 0, 3])).tolist()
    [5, 6, 1, 2, 3]
    """
    before = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)


@dataclass(frozen=True, kw_only=True)
class UserIndex:
    """The rows of user i are `rows[indptr[i]:indptr[i + 1]]`.

    `batches` is for a fixed order (`sampling.MinSeparated`): `batches[t]` holds the rows of step t,
    and -1 in a slot whose record gives nothing.
    """

    indptr: Rows
    rows: Rows
    batches: Rows | None = None

    def __post_init__(self) -> None:
        assert self.indptr.ndim == 1
        assert self.indptr[0] == 0
        assert self.indptr[-1] == len(self.rows)

    def __repr__(self) -> str:
        return "UserIndex(<secret>)"

    @property
    def num_users(self) -> int:
        """The actual number of users. Secret, unlike the public number of a plan."""
        return len(self.indptr) - 1

    @property
    def num_rows(self) -> int:
        """The actual number of rows. Secret."""
        return len(self.rows)

    @cached_property
    def widest(self) -> int:
        """The most rows that a user has. Secret."""
        return int(np.diff(self.indptr).max(initial=0))

    def rows_of(self, user: int) -> Rows:
        """The rows of one user."""
        return self.rows[self.indptr[user] : self.indptr[user + 1]]

    def check_owners(self) -> None:
        """Refuse a row that two users own: each of them would count for the other's share, too."""
        owner = np.repeat(np.arange(self.num_users), np.diff(self.indptr))
        if (self.owner_of_rows()[self.rows] != owner).any():
            raise InputError(
                "a row of the index belongs to several users, and no price covers that: give every "
                "row one owner, or bound contributions (`userdp bound`) and train on the selection."
            )

    def owner_of_rows(self) -> Rows:
        """The number of each row's user; -1 for a row that nobody owns. Secret."""
        found = np.full(int(self.rows.max(initial=-1)) + 1, -1, dtype=np.int64)
        found[self.rows] = np.repeat(np.arange(self.num_users), np.diff(self.indptr))
        return found

    @staticmethod
    def from_owners(owners: Iterable[Hashable]) -> UserIndex:
        """The index of rows 0, 1, 2, ..., whose owners are given in order.

        Users are numbered in order of appearance. An owner is a string, a whole number, bytes, or a
        tuple of these. All owners are of one kind. An array or a tensor of such values works, too.
        Anything else is refused: two values may mean one person and yet be unequal (NaN, tensors).
        Each row would then count as a user of its own.

        >>> index = UserIndex.from_owners(["ann", "bob", "ann"])
        >>> [index.rows_of(user).tolist() for user in range(index.num_users)]
        [[0, 2], [1]]
        """
        # The entries of a tensor or an array are hashed by identity, so their plain values are
        # used.
        plain: Iterable[Any] = cast("Any", owners).tolist() if hasattr(owners, "tolist") else owners
        numbers: dict[Hashable, int] = {}
        owner_of_row = [numbers.setdefault(_owner(owner), len(numbers)) for owner in plain]
        if len({type(owner) for owner in numbers}) > 1:
            raise InputError(
                "owners are of several kinds (such as 1 and '1', which may be one person): give "
                "all of them as strings, or all as whole numbers."
            )
        return UserIndex.from_owner_numbers(
            np.asarray(owner_of_row, dtype=np.int64), num_users=len(numbers)
        )

    @staticmethod
    def from_owner_numbers(owner_of_row: Rows, *, num_users: int) -> UserIndex:
        """The index of rows whose owner numbers (0 to `num_users` - 1) are given in order."""
        counts = np.bincount(owner_of_row, minlength=num_users)
        indptr = indptr_of(counts)
        return UserIndex(
            indptr=indptr, rows=np.argsort(owner_of_row, kind="stable").astype(np.int64)
        )


def _owner(value: Any) -> Hashable:
    """The owner as a plain value with the usual equality. Anything else is refused."""
    if isinstance(value, tuple):
        return tuple(_owner(part) for part in cast("tuple[Any, ...]", value))
    if not isinstance(value, str | bytes) and hasattr(value, "item") and np.ndim(value) == 0:
        value = value.item()
    # `bool` is a kind of `int`, and True would be the same person as 1.
    if isinstance(value, bool) or not isinstance(value, str | int | bytes):
        raise InputError(
            f"an owner is of type {type(value).__name__}: give a string, a whole number, bytes, or "
            "a tuple of these for every row. Rows without an owner must be left out, or each be "
            "given an id of its own."
        )
    # Subclasses may define their own equality, so convert to the plain type.
    if isinstance(value, str):
        return str(value)
    return int(value) if isinstance(value, int) else bytes(value)
