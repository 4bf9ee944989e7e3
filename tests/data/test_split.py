from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from importing import KEY, contents

from userdp.data import split
from userdp.data.record import Record
from userdp.data.store import UserStore, write_store
from userdp.errors import InputError


@pytest.fixture
def store(tmp_path: Path) -> UserStore:
    rng = np.random.default_rng(5)
    items = [
        Record(
            f"text {i}",
            tuple(f"user {u}" for u in rng.choice(40, size=rng.integers(1, 4), replace=False)),
            "here",
            time=i,
        )
        for i in range(300)
    ]
    write_store(items, tmp_path / "store", key=KEY)
    return UserStore.open(tmp_path / "store")


def owners(store: UserStore, records: np.ndarray) -> set[int]:
    return {
        int(user)
        for record in records
        for user in store.record_users[
            store.record_users_indptr[record] : store.record_users_indptr[record + 1]
        ]
    }


def test_split_by_user_keeps_users_apart(store: UserStore) -> None:
    halves = split.by_user(store, share=0.3, rng=np.random.default_rng(0))
    assert not owners(store, halves.train) & owners(store, halves.held_out)
    assert len(halves.train) + len(halves.held_out) + halves.left_out == store.num_records
    assert halves.left_out > 0


def test_beginning_of_each_user_is_the_papers_rule(tmp_path: Path) -> None:
    sizes = {"one": 1, "few": 5, "ten": 10, "many": 500}
    items = [Record(f"{user} {i}", (user,), "here") for user, n in sizes.items() for i in range(n)]
    write_store(items, tmp_path / "store", key=KEY)
    store = UserStore.open(tmp_path / "store")
    halves = split.beginning_of_each_user(store)
    held_out = store.texts_of(halves.held_out)
    assert [sum(text.startswith(user) for text in held_out) for user in sizes] == [0, 1, 1, 32]
    assert "ten 0" in held_out
    assert halves.left_out == 1


def test_split_by_time_is_before_and_after(store: UserStore) -> None:
    halves = split.by_time(store, cutoff=120)
    assert halves.train.tolist() == list(range(120))
    assert halves.held_out.tolist() == list(range(120, 300))


@pytest.mark.parametrize("share", [0.0, 1.0, 0.001, 0.999])
def test_an_empty_side_is_refused(store: UserStore, share: float) -> None:
    with pytest.raises(InputError, match="share="):
        split.by_user(store, share=share, rng=np.random.default_rng(0))


def test_subset_keeps_texts_owners_times_and_pseudonyms(store: UserStore, tmp_path: Path) -> None:
    chosen = np.arange(0, 300, 7)
    split.write_subset(store, chosen, tmp_path / "some")
    some = UserStore.open(tmp_path / "some")

    def named(store: UserStore) -> list[tuple[str, list[bytes]]]:
        names = store.pseudonyms.to_pylist()
        return [(text, [names[user] for user in users]) for text, users in contents(store)]

    assert named(some) == [named(store)[record] for record in chosen]
    assert some.times is not None
    assert some.times.tolist() == chosen.tolist()
    assert some.shares_users_with(store) == some.num_users
