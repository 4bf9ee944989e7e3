from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from importing import KEY, contents

from store_copies import COPIES
from userdp.data import split
from userdp.data.record import Record
from userdp.data.store import UserStore, write_store
from userdp.errors import InputError


def some_records() -> list[Record]:
    rng = np.random.default_rng(5)
    return [
        Record(
            f"text {i}",
            tuple(f"user {u}" for u in rng.choice(40, size=rng.integers(1, 4), replace=False)),
            "here",
            time=i,
        )
        for i in range(300)
    ]


RECORDS = some_records()


@pytest.fixture
def store(tmp_path: Path) -> UserStore:
    COPIES.make(
        "records to be split",
        tmp_path / "store",
        lambda out: write_store(RECORDS, out, key=KEY),
    )
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
    halves = split.by_user(store, share=0.3)
    assert not owners(store, halves.train) & owners(store, halves.held_out)
    assert len(halves.train) + len(halves.held_out) + halves.left_out == store.num_records
    assert halves.left_out > 0


def test_users_who_lose_records_are_counted(store: UserStore) -> None:
    """Counted again, user by user, in plain Python."""
    halves = split.by_user(store, share=0.3)
    kept = set(halves.train.tolist()) | set(halves.held_out.tolist())
    left = [kept.issuperset(store.records_of(user).tolist()) for user in range(store.num_users)]
    gone = [kept.isdisjoint(store.records_of(user).tolist()) for user in range(store.num_users)]
    assert halves.users_left_out == sum(gone)
    assert halves.users_cut == store.num_users - sum(gone) - sum(left)
    assert halves.users_cut > 0


def sides(store: UserStore, halves: split.Split) -> dict[str, set[str]]:
    """The texts on either side."""
    return {
        "train": set(store.texts_of(halves.train)),
        "held out": set(store.texts_of(halves.held_out)),
    }


@pytest.mark.parametrize("left", range(0, 40, 7))
def test_removing_one_user_moves_no_other_record(
    store: UserStore, tmp_path: Path, left: int
) -> None:
    """Records of several owners: whoever leaves takes the records they own, and nothing else."""
    without = [record for record in RECORDS if f"user {left}" not in record.owners]
    write_store(without, tmp_path / "without", key=KEY)
    rest = UserStore.open(tmp_path / "without")
    stays = {record.text for record in without}
    before = sides(store, split.by_user(store, share=0.3))
    after = sides(rest, split.by_user(rest, share=0.3))
    assert after == {name: texts & stays for name, texts in before.items()}


def alone(path: Path, names: list[str], key: bytes = KEY) -> UserStore:
    """A store in which each user has one record, which is the name."""
    write_store([Record(name, (name,), "here") for name in names], path, key=key)
    return UserStore.open(path)


@pytest.mark.statistical
@pytest.mark.parametrize(("share", "seed"), [(0.1, 0), (0.3, 0), (0.5, 1)])
def test_share_is_met_on_average_also_in_a_part_of_a_part(
    tmp_path: Path, share: float, seed: int
) -> None:
    """Fixed key and seeds; 4 standard deviations of a binomial, missed with probability 6e-5.

    The second split has the seed and share of the first: were its hash the same, one side would be
    empty.
    """
    store = alone(tmp_path / "store", [f"user {i}" for i in range(4000)])
    for name in ("first", "second"):
        halves = split.by_user(store, share=share, seed=seed)
        spread = np.sqrt(store.num_users * share * (1 - share))
        assert abs(len(halves.held_out) - store.num_users * share) < 4 * spread
        split.write_subset(store, halves.train, tmp_path / name, made_by=halves.made_by)
        store = UserStore.open(tmp_path / name)


@pytest.mark.statistical
def test_users_without_the_key_cannot_choose_their_side(tmp_path: Path) -> None:
    """Ids that are on one side under one key are on either side under another.

    Two fixed keys. 200 ids, share 1/2: fewer than 60 or more than 140 on one side has probability
    below 1e-8.
    """
    names = [f"user {i}" for i in range(400)]
    mine = alone(tmp_path / "mine", names)
    chosen = mine.texts_of(split.by_user(mine, share=0.5).train)[:150]
    theirs = alone(tmp_path / "theirs", chosen, key=bytes(reversed(KEY)))
    halves = split.by_user(theirs, share=0.5)
    assert 45 < len(halves.train) < 105


def test_users_are_on_the_same_side_in_all_stores_of_one_key(tmp_path: Path) -> None:
    names = [f"user {i}" for i in range(100)]
    early, late = alone(tmp_path / "early", names[:60]), alone(tmp_path / "late", names[40:])
    train = [sides(store, split.by_user(store, share=0.4))["train"] for store in (early, late)]
    both = set(names[40:60])
    assert train[0] & both == train[1] & both
    assert 0 < len(train[0] & both) < 20


def test_another_seed_holds_out_other_users(tmp_path: Path) -> None:
    store = alone(tmp_path / "store", [f"user {i}" for i in range(100)])
    held_out = [sides(store, split.by_user(store, share=0.5, seed=s))["held out"] for s in (0, 1)]
    assert len(held_out[0] ^ held_out[1]) > 20


def test_beginning_of_records_with_several_owners_is_refused(store: UserStore) -> None:
    with pytest.raises(InputError, match="several owners"):
        split.beginning_of_each_user(store)


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
        split.by_user(store, share=share)


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


def test_cautions_are_inherited_by_every_store_made_from_it(
    store: UserStore, tmp_path: Path
) -> None:
    assert store.cautions == ()
    everything = np.arange(300)
    split.write_subset(store, everything, tmp_path / "a", cautions=["first"])
    split.write_subset(
        UserStore.open(tmp_path / "a"), everything, tmp_path / "b", cautions=["second", "first"]
    )
    assert UserStore.open(tmp_path / "b").cautions == ("first", "second")


@pytest.mark.parametrize("damage", ["removed", "emptied", "edited"])
def test_a_caution_cannot_be_lost_unnoticed(store: UserStore, tmp_path: Path, damage: str) -> None:
    split.write_subset(store, np.arange(300), tmp_path / "some", cautions=["across users"])
    history = tmp_path / "some" / "history.json"
    if damage == "removed":
        history.unlink()
    else:
        content = history.read_text()
        new = "{}" if damage == "emptied" else content.replace("across users", "alright now!")
        history.write_text(new)
    with pytest.raises(InputError, match="changed since the import"):
        _ = UserStore.open(tmp_path / "some").cautions
