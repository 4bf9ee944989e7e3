"""Whose rows are whose."""

from __future__ import annotations

import hypothesis
import numpy as np
from hypothesis import strategies as st

from userdp.index import UserIndex, ranges


@hypothesis.given(st.lists(st.text(max_size=2), max_size=40))
def test_every_row_belongs_to_its_owner_and_to_nobody_else(owners: list[str]) -> None:
    index = UserIndex.from_owners(owners)
    first_seen = list(dict.fromkeys(owners))
    assert index.num_users == len(first_seen)
    assert index.num_rows == len(owners)
    for number, owner in enumerate(first_seen):
        expected = [row for row, other in enumerate(owners) if other == owner]
        assert index.rows_of(number).tolist() == expected


def test_user_without_rows_keeps_a_place() -> None:
    index = UserIndex.from_owner_numbers(np.array([2, 0]), num_users=4)
    assert [index.rows_of(user).tolist() for user in range(4)] == [[1], [], [0], []]


def test_ranges_of_nothing_are_empty() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    assert len(ranges(nothing, nothing)) == 0
    assert len(ranges(7, np.zeros(3, dtype=np.int64))) == 0
