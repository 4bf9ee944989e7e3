"""Whose rows are whose: the map from users to rows that samplers draw from.

A row is one training sequence; it has one owner here. The index holds numbers only, never text, so
everything built on it (sampling, accounting) can be read and tested without data. The index itself
is secret: which user owns how many rows is private.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from userdp.errors import InputError

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

    def owner_of_rows(self) -> Rows:
        """The number of each row's user, -1 for rows of nobody. Secret."""
        found = np.full(int(self.rows.max(initial=-1)) + 1, -1, dtype=np.int64)
        found[self.rows] = np.repeat(np.arange(self.num_users), np.diff(self.indptr))
        return found

    @staticmethod
    def from_owners(owners: Iterable[Hashable]) -> UserIndex:
        """Index rows 0, 1, 2, ... whose owners are given in order; users number by appearance.

        An owner is a string, a whole number, bytes, or a tuple of these; all are of one kind. An
        array or a tensor of such values will do. Anything else is refused: two values that mean one
        person may be unequal (NaN, tensors), and each row would then count as a user of its own.

        >>> index = UserIndex.from_owners(["ann", "bob", "ann"])
        >>> [index.rows_of(user).tolist() for user in range(index.num_users)]
        [[0, 2], [1]]
        """
        # A tensor's or an array's own entries are hashed by identity: its plain values are taken.
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
        """Index rows whose owner numbers (0 to `num_users` - 1) are given in order."""
        counts = np.bincount(owner_of_row, minlength=num_users)
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return UserIndex(
            indptr=indptr, rows=np.argsort(owner_of_row, kind="stable").astype(np.int64)
        )


def _owner(value: Any) -> Hashable:
    """The owner as a plain value that is equal to its equals; anything else is refused."""
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
    # Subclasses may compare in ways of their own.
    if isinstance(value, str):
        return str(value)
    return int(value) if isinstance(value, int) else bytes(value)
