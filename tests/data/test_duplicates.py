from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from importing import KEY

from userdp.data import duplicates
from userdp.data.record import Record
from userdp.data.store import UserStore, write_store


def words(rng: np.random.Generator, count: int) -> list[str]:
    return [f"w{number}" for number in rng.integers(0, 5000, size=count)]


def plain_grams(text: str) -> set[tuple[str, ...]]:
    found = text.lower().split()
    return {tuple(found[i : i + 5]) for i in range(max(1, len(found) - 4))}


@given(
    st.lists(
        st.lists(st.sampled_from(["a", "B", "c\xe9", "d"]), min_size=1, max_size=9).map(" ".join),
        min_size=1,
        max_size=6,
    )
)
def test_gram_hashes_are_equal_exactly_where_grams_are(texts: list[str]) -> None:
    grams, counts = duplicates.shingles(pa.array(texts, pa.large_string()))
    ends = np.cumsum(counts)
    hashes = [set(grams[end - n : end].tolist()) for end, n in zip(ends, counts, strict=True)]
    sets = [plain_grams(text) for text in texts]
    for left, left_set in zip(hashes, sets, strict=True):
        for right, right_set in zip(hashes, sets, strict=True):
            assert len(left & right) == len(left_set & right_set)


@pytest.fixture
def store(tmp_path: Path) -> UserStore:
    """200 different texts; three come again: as they are, in capitals, with one new word."""
    rng = np.random.default_rng(11)
    texts = [" ".join(words(rng, 60)) for _ in range(200)]
    changed = texts[2].split()
    changed[0] = "other"
    texts += [texts[0], texts[1].upper(), " ".join(changed), texts[0] + " more"]
    items = [Record(text, (f"user {i}",), "1") for i, text in enumerate(texts)]
    write_store(items, tmp_path / "store", key=KEY)
    return UserStore.open(tmp_path / "store")


@pytest.mark.statistical
def test_planted_copies_are_found_and_nothing_else(store: UserStore, tmp_path: Path) -> None:
    """Fixed hashes: similarity 0.96 and more is missed with probability below 1e-10 a pair."""
    clusters = duplicates.across_users(store, tmp_path / "scratch")
    groups = [
        np.flatnonzero(clusters.cluster == number).tolist()
        for number in range(clusters.num_clusters)
    ]
    assert groups == [[0, 200, 203], [1, 201], [2, 202]]
    assert clusters.copies.tolist() == [200, 201, 202, 203]
    assert clusters.users_per_cluster(store).tolist() == [3, 2, 2]


def test_similarity_below_the_threshold_does_not_count(store: UserStore, tmp_path: Path) -> None:
    """One new word at the end of 60 changes 1 of 57 grams; one in front 1 of 56."""
    exact = duplicates.across_users(store, tmp_path / "scratch", threshold=1.0)
    assert exact.copies.tolist() == [200, 201]


def test_public_texts_in_the_store_are_named(store: UserStore, tmp_path: Path) -> None:
    rng = np.random.default_rng(12)
    public = [" ".join(words(rng, 60)), store.text(7), " ".join(words(rng, 60)), store.text(0)]
    shared, private = duplicates.between(public, store, tmp_path / "scratch")
    assert shared.tolist() == [1, 3]
    assert private.tolist() == [0, 7, 200, 203]


def test_records_are_compared_with_public_texts_and_not_with_each_other(tmp_path: Path) -> None:
    """A chain public - a - b, of similarity 0.88 and 0.84; b is 0.78 like the public text.

    Without a, b stays; so it must stay with a.
    """
    rng = np.random.default_rng(13)
    text = words(rng, 200)
    public = " ".join(text)
    first = " ".join(["one"] * 20 + text[20:])
    second = " ".join(["two"] * 40 + text[40:])
    chain = [Record(first, ("a",), "1"), Record(second, ("b",), "2")]
    write_store(chain, tmp_path / "store", key=KEY)
    store = UserStore.open(tmp_path / "store")
    linked = duplicates.across_users(store, tmp_path / "scratch")
    assert linked.copies.tolist() == [1]
    shared, private = duplicates.between([public, public.upper()], store, tmp_path / "scratch")
    assert shared.tolist() == [0, 1]
    assert private.tolist() == [0]


def plain_copies(items: list[Record]) -> set[str]:
    """Where the later of equal texts of the same owners are, by comparing all pairs."""
    return {
        later.where
        for i, later in enumerate(items)
        if any(set(later.owners) == set(one.owners) and later.text == one.text for one in items[:i])
    }


def some_records() -> list[Record]:
    """Five texts, users a to f, one to three owners in any order."""
    rng = np.random.default_rng(14)
    texts = [" ".join(words(rng, 20)) for _ in range(5)]
    return [
        Record(
            texts[int(rng.integers(5))],
            tuple(rng.permutation(list("abcdef"))[: int(rng.integers(1, 4))].tolist()),
            f"{number}",
        )
        for number in range(120)
    ]


@pytest.mark.parametrize("leaves", [None, *"abcdef"])
def test_copies_inside_users_are_those_of_the_same_owners_whoever_leaves(
    tmp_path: Path, leaves: str | None
) -> None:
    items = [record for record in some_records() if leaves not in record.owners]
    write_store(items, tmp_path / "store", key=KEY)
    found = duplicates.inside_users(UserStore.open(tmp_path / "store"), tmp_path / "scratch")
    removed = {items[record].where for record in found.copies.tolist()}
    assert removed == plain_copies(items) == plain_copies(some_records()) & {r.where for r in items}
    assert removed
