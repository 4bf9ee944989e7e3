"""Each user's best records by a criterion, and random chunks of a user's text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from letters import ITEMS, Letters, store_of

from userdp.data.record import Record
from userdp.data.select import best_records, random_chunks
from userdp.data.store import UserStore, write_store
from userdp.data.tokens import TokenRows, tokenise
from userdp.errors import InputError

KEY = bytes(range(32))


def make(path: Path, owners: list[int]) -> UserStore:
    write_store([Record("text", (f"u{o}",), str(i)) for i, o in enumerate(owners)], path, key=KEY)
    return UserStore.open(path)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> UserStore:
    owners = np.random.default_rng(0).integers(0, 5, size=40).tolist()
    return make(tmp_path_factory.mktemp("select") / "store", owners)


@given(scores=st.lists(st.sampled_from([-np.inf, 0.0, 1.0, 2.5]), min_size=40, max_size=40))
def test_every_user_keeps_the_highest_scores_and_of_equal_ones_the_earlier(
    store: UserStore, scores: list[float]
) -> None:
    for at_most in (1, 3, 100):
        found = best_records(store, np.array(scores), at_most=at_most)
        kept: set[int] = set()
        for user in range(store.num_users):
            own = sorted(store.records_of(user).tolist(), key=lambda i: (-scores[i], i))
            kept |= set(own[:at_most])
        assert set(np.flatnonzero(found).tolist()) == kept
        assert found.max() == 1


@settings(max_examples=15)
@given(st.data())
def test_a_user_who_leaves_changes_no_other_users_records(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    owners = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=15))
    scores = np.array(data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=15, max_size=15)))
    scores = scores[: len(owners)]
    gone = owners[0]
    stays = np.array(owners) != gone
    folder = tmp_path_factory.mktemp("select")
    with_user = best_records(make(folder / "with", owners), scores, at_most=2)
    if stays.any():
        rest = [owner for owner in owners if owner != gone]
        without = best_records(make(folder / "without", rest), scores[stays], at_most=2)
        assert with_user[stays].tolist() == without.tolist()


def test_records_of_several_owners_are_refused_with_the_reason(tmp_path: Path) -> None:
    write_store([Record("text", ("ann", "bob"), "1")], tmp_path / "store", key=KEY)
    store = UserStore.open(tmp_path / "store")
    with pytest.raises(InputError, match="one user's text change which records of another"):
        best_records(store, np.zeros(1), at_most=1)


def test_random_chunks_cross_records_of_one_user_and_never_users(tmp_path: Path) -> None:
    rows = tokenise(store_of(tmp_path, ITEMS), Letters(), sequence_length=16)
    rng = np.random.default_rng(1)

    def drawn(user: int) -> tuple[list[str], TokenRows]:
        chunks = random_chunks(
            rows, rows.index().rows_of(user), count=200, sequence_length=4, rng=rng
        )
        texts = np.split(chunks.tokens, chunks.indptr[1:-1])
        return ["".join(chr(t) if t else "." for t in text) for text in texts], chunks

    document = "abcdefg.hijk."
    texts, chunks = drawn(0)
    # All ten beginnings are seen: missing one of them has probability below 10 * 0.9^200 < 1e-8.
    assert set(texts) == {document[i : i + 4] for i in range(10)}
    assert "fg.h" in texts
    assert chunks.owners.tolist() == [0] * 200
    texts, chunks = drawn(2)
    assert texts == ["z."] * 200
    assert chunks.owners.tolist() == [2] * 200
