"""Users of exactly so many tokens, against a count by hand; and what one user's rows decide."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from userdp.data.same_size import equally_long
from userdp.data.tokens import TokenRows

USERS = 4
# Rows as (owner, number of tokens), in the order of the data.
rows_strategy = st.lists(st.tuples(st.integers(0, USERS - 1), st.integers(1, 9)), max_size=20)


def table(rows: list[tuple[int, int]]) -> TokenRows:
    """Every token is its own number, so that nothing can be mistaken for something else."""
    lengths = [size for _, size in rows]
    count = sum(lengths)
    return TokenRows(
        tokens=np.arange(count, dtype=np.int32),
        indptr=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        owners=np.array([owner for owner, _ in rows], np.int64),
        num_users=USERS,
        labelled=np.arange(count) % 3 == 0,
        classes=np.arange(len(rows)),
        records=np.arange(len(rows)) // 2,
    )


def listed(rows: TokenRows) -> list[list[int]]:
    return [
        rows.tokens[rows.indptr[i] : rows.indptr[i + 1]].tolist() for i in range(len(rows.owners))
    ]


def by_hand(rows: TokenRows, count: int) -> list[tuple[int, list[int]]]:
    """Owner and tokens of every row that is left, user by user and token by token."""
    taken = dict.fromkeys(range(USERS), 0)
    totals = dict.fromkeys(range(USERS), 0)
    for owner, row in zip(rows.owners.tolist(), listed(rows), strict=True):
        totals[owner] += len(row)
    found: list[tuple[int, list[int]]] = []
    for owner, row in zip(rows.owners.tolist(), listed(rows), strict=True):
        part: list[int] = []
        for token in row:
            if totals[owner] >= count and taken[owner] < count:
                taken[owner] += 1
                part.append(token)
        if len(part) > 1 or (part and len(row) == 1):
            found.append((owner, part))
    return found


@given(rows=rows_strategy, count=st.integers(2, 30))
def test_users_have_exactly_so_many_tokens_or_none(rows: list[tuple[int, int]], count: int) -> None:
    whole = table(rows)
    found = equally_long(whole, count)
    wanted = by_hand(whole, count)
    assert list(zip(found.owners.tolist(), listed(found), strict=True)) == wanted
    assert found.num_users == USERS
    for user in range(USERS):
        own = sum(len(row) for owner, row in wanted if owner == user)
        assert own in (0, count - 1, count)
    # What belongs to a token or a row goes with it.
    assert found.labelled is not None
    assert found.labelled.tolist() == [token % 3 == 0 for token in found.tokens.tolist()]
    rows_left = [int(np.searchsorted(whole.indptr, row[0], "right")) - 1 for row in listed(found)]
    assert found.classes is not None
    assert found.classes.tolist() == rows_left
    assert found.records is not None
    assert found.records.tolist() == [row // 2 for row in rows_left]


@given(rows=rows_strategy, count=st.integers(2, 30), user=st.integers(0, USERS - 1))
def test_what_a_user_gives_depends_on_its_own_rows_alone(
    rows: list[tuple[int, int]], count: int, user: int
) -> None:
    def given_by(found: TokenRows) -> list[int]:
        own = found.owners == user
        return [len(row) for row, is_own in zip(listed(found), own, strict=True) if is_own]

    alone = [row for row in rows if row[0] == user]
    assert given_by(equally_long(table(rows), count)) == given_by(equally_long(table(alone), count))


def test_rows_without_labels_classes_and_records_stay_without_them() -> None:
    plain = replace(table([(0, 3), (0, 4)]), labelled=None, classes=None, records=None)
    found = equally_long(plain, 5)
    assert (found.labelled, found.classes, found.records) == (None, None, None)
    assert listed(found) == [[0, 1, 2], [3, 4]]
