"""Stores in object storage: opened by URL, read in blocks, trained on from their home."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import tiny
from userdp.budget.population import Population
from userdp.data import remote, remote_tokens
from userdp.data.remote import RemoteArray, RemoteFile
from userdp.data.store import UserStore
from userdp.data.tokens import tokenise
from userdp.errors import InputError
from userdp.plan import Plan
from userdp.streams import RunSecret
from userdp.training.loop import train

COUNTS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def storage() -> Iterator[Any]:
    """Storage in memory, empty before and after."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    yield memory
    memory.store.clear()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (remote, remote_tokens):
        monkeypatch.setattr(module, "BLOCK", 64)
    monkeypatch.setattr(remote, "MOST_BLOCKS", 4)


@pytest.fixture
def local(tmp_path: Path) -> UserStore:
    return tiny.make_store(tmp_path / "local", COUNTS)


def uploaded(store: UserStore, url: str) -> str:
    """A copy of the whole folder, as a tool of the storage would make it."""
    storage, place = fsspec.core.url_to_fs(url)
    storage.put(f"{store.path}/", f"{place}/", recursive=True)
    return url


def urls(tmp_path: Path) -> list[str]:
    return ["memory://bucket/store", f"file://{tmp_path}/elsewhere/store"]


# ---- numbers


def test_what_is_indexed_is_what_was_written(storage: Any) -> None:
    numbers = np.random.default_rng(0).integers(0, 1000, 501, dtype=np.int32)
    storage.pipe_file("/numbers", numbers.tobytes())
    array = RemoteArray(RemoteFile("memory://numbers"), np.int32)
    assert len(array) == 501
    for index in (0, -1, 500, slice(3, 77, 5), [4, 400, 4], np.array([[1, 2], [499, 3]])):
        assert np.array_equal(array[index], numbers[index])
    assert np.array_equal(array[numbers > 500], numbers[numbers > 500])
    assert np.array_equal(np.asarray(array), numbers)
    for wrong in (501, -502):
        with pytest.raises(IndexError):
            array[wrong]


def test_only_the_blocks_that_hold_them_are_fetched_and_once(storage: Any) -> None:
    storage.pipe_file("/numbers", np.arange(160, dtype=np.int32).tobytes())
    file = RemoteFile("memory://numbers")
    array = RemoteArray(file, np.int32)
    assert array[[3, 15, 16]].tolist() == [3, 15, 16]
    assert file.bytes_read == 2 * 64
    assert array[[2, 17]].tolist() == [2, 17]
    assert file.bytes_read == 2 * 64
    # At most four blocks are kept.
    assert array[100:160].sum() == np.arange(100, 160).sum()
    assert file.bytes_read == 6 * 64
    assert array[3] == 3
    assert file.bytes_read == 7 * 64


def test_a_block_that_changed_is_refused(storage: Any, tmp_path: Path) -> None:
    content = np.arange(100, dtype=np.int32).tobytes()
    (tmp_path / "tokens.i32").write_bytes(content)
    remote_tokens.write_blocks(tmp_path)
    digests = json.loads((tmp_path / "blocks.json").read_text())["sha256"]["tokens.i32"]
    storage.pipe_file("/numbers", content[:70] + b"\xff" + content[71:])
    array = RemoteArray(RemoteFile("memory://numbers", digests=digests), np.int32)
    assert array[:16].tolist() == list(range(16))
    with pytest.raises(InputError, match="changed since it was written"):
        array[17]
    storage.pipe_file("/numbers", content[:-70])
    with pytest.raises(InputError, match="changed since it was written"):
        RemoteFile("memory://numbers", digests=digests)


# ---- stores


@pytest.mark.usefixtures("storage")
@pytest.mark.parametrize("kind", [0, 1])
def test_a_store_by_url_is_the_store(local: UserStore, tmp_path: Path, kind: int) -> None:
    url = uploaded(local, urls(tmp_path)[kind])
    store = UserStore.open(url, home=tmp_path / "home")
    assert (store.num_records, store.num_users) == (local.num_records, local.num_users)
    assert store.fingerprint == local.fingerprint
    assert np.array_equal(store.sole_owners(), local.sole_owners())
    users = np.array([5, 0])
    for a, b in zip(store.records_of_users(users), local.records_of_users(users), strict=True):
        assert np.array_equal(a, b)
    store.verify()
    assert not (tmp_path / "home/records.arrow").exists()
    assert store.texts_of(np.array([7, 2])) == local.texts_of(np.array([7, 2]))
    assert store.shares_users_with(local) == len(COUNTS)
    # Any command takes the home.
    again = UserStore.open(tmp_path / "home")
    assert again.text(3) == local.text(3)
    again.verify()


def test_opening_reads_no_text_and_no_edges(local: UserStore, tmp_path: Path, storage: Any) -> None:
    url = uploaded(local, "memory://bucket/store")
    read: list[str] = []
    cat_file = type(storage).cat_file

    def noted(self: Any, path: str, *args: Any, **kwargs: Any) -> bytes:
        read.append(path.rsplit("/", 1)[1])
        return cat_file(self, path, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(storage), "cat_file", noted)
        store = UserStore.open(url, home=tmp_path / "home")
        assert set(read) <= {"manifest.json", "history.json", "population.json"}
        store.records_of(0)
    assert set(read) <= {"manifest.json", "history.json", "user_records.npy"} | {
        "user_records_indptr.npy",
        "population.json",
    }


def test_changed_owners_and_texts_are_refused(
    local: UserStore, tmp_path: Path, storage: Any
) -> None:
    url = uploaded(local, "memory://bucket/store")

    def flipped(name: str, place: int) -> None:
        content = bytearray(storage.cat_file(f"/bucket/store/{name}"))
        content[place] ^= 1
        storage.pipe_file(f"/bucket/store/{name}", bytes(content))

    flipped("record_users.npy", 128)
    with pytest.raises(InputError, match="owners changed"):
        UserStore.open(url, home=tmp_path / "first").verify()
    flipped("record_users.npy", 128)
    flipped("records.arrow", 700)
    changed = UserStore.open(url, home=tmp_path / "second")
    with pytest.raises(InputError, match=r"changed|damaged"):
        changed.text(0)
    flipped("user_records.npy", 128)
    with pytest.raises(InputError, match="changed since the import"):
        UserStore.open(url, home=tmp_path / "third").verify()
    storage.rm("/bucket/store/user_records.npy")
    with pytest.raises(InputError, match="missing or changed"):
        UserStore.open(url, home=tmp_path / "fourth")


def test_a_url_needs_a_home_of_its_own(local: UserStore, tmp_path: Path, storage: Any) -> None:
    url = uploaded(local, "memory://bucket/store")
    with pytest.raises(InputError, match="give a home"):
        UserStore.open(url)
    UserStore.open(url, home=tmp_path / "home")
    UserStore.open(url, home=tmp_path / "home")
    other = uploaded(tiny.make_store(tmp_path / "other", [2, 2]), "memory://bucket/other")
    with pytest.raises(InputError, match="home of another store"):
        UserStore.open(other, home=tmp_path / "home")
    with pytest.raises(InputError, match="home of another store"):
        UserStore.open(url, home=local.path)
    with pytest.raises(InputError, match=r"no manifest\.json"):
        UserStore.open("memory://bucket/nothing", home=tmp_path / "new")
    with pytest.raises(InputError, match="nosuch"):
        UserStore.open("nosuch://bucket/nothing", home=tmp_path / "new")


def test_the_budget_lies_beside_the_home_and_a_lost_one_is_missed(
    local: UserStore, tmp_path: Path, storage: Any
) -> None:
    url = uploaded(local, "memory://bucket/store")
    people = Population.of(UserStore.open(url, home=tmp_path / "home"))
    people.set_limit(3.0, 1e-6)
    assert people.path == tmp_path / "home.population"
    # A store that was counted before it was copied names its budget.
    Population.of(local).set_limit(2.0, 1e-6)
    counted = uploaded(local, "memory://bucket/counted")
    found = Population.of(UserStore.open(counted, home=tmp_path / "second"))
    assert found.path == tmp_path / "local.population"
    (tmp_path / "local.population").rename(tmp_path / "moved")
    with pytest.raises(Exception, match="not there"):
        Population.of(UserStore.open(counted, home=tmp_path / "third"))


# ---- tokens


def test_ranks_read_the_blocks_of_their_users(
    tmp_path: Path, storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tiny.make_store(tmp_path / "many", [40] * 16)
    _, tokenizer = tiny.make_model(tmp_path / "model")
    expected = tokenise(local, tokenizer, sequence_length=16)
    url = uploaded(local, "memory://bucket/store")
    whole = 4 * len(expected.tokens)
    read: list[int] = []
    for rank in range(4):
        store = UserStore.open(url, home=tmp_path / f"home {rank}")
        rows = tokenise(store, tokenizer, sequence_length=16, verify=True)
        tokens: Any = rows.tokens
        assert isinstance(tokens, RemoteArray)
        assert np.array_equal(rows.owners, expected.owners)
        assert tokens.file.bytes_read == 0
        # Users of a store made in this order lie together.
        mine = np.flatnonzero(rows.owners // 4 == rank)
        for part in np.array_split(mine, 10):
            for a, b in zip(
                rows.padded(part, pad_token=0), expected.padded(part, pad_token=0), strict=True
            ):
                assert np.array_equal(a, b)
        read.append(tokens.file.bytes_read)
        assert not (tmp_path / f"home {rank}/records.arrow").exists()
    # A block at each end of a part may be read twice or belong to others, too.
    own = whole // 4
    assert all(bytes_read <= 1.2 * own + 20 * 64 for bytes_read in read)
    assert sum(read) >= whole


def test_a_cache_that_changed_in_storage_is_refused(
    local: UserStore, tmp_path: Path, storage: Any
) -> None:
    _, tokenizer = tiny.make_model(tmp_path / "model")
    tokenise(local, tokenizer, sequence_length=16)
    url = uploaded(local, "memory://bucket/store")
    (place,) = [
        p for p in storage.find("/bucket/store") if p.endswith("indptr.npy") and "tokens" in p
    ]
    content = bytearray(storage.cat_file(place))
    content[-1] ^= 1
    storage.pipe_file(place, bytes(content))
    with pytest.raises(InputError, match="changed since"):
        tokenise(UserStore.open(url, home=tmp_path / "home"), tokenizer, sequence_length=16)


def test_without_a_cache_in_storage_one_is_made_at_home(
    local: UserStore, tmp_path: Path, storage: Any
) -> None:
    _, tokenizer = tiny.make_model(tmp_path / "model")
    store = UserStore.open(uploaded(local, "memory://bucket/store"), home=tmp_path / "home")
    rows = tokenise(store, tokenizer, sequence_length=16, verify=True)
    assert np.array_equal(rows.tokens, tokenise(local, tokenizer, sequence_length=16).tokens)


@pytest.mark.slow
def test_training_from_storage_is_training_from_disk(tmp_path: Path, storage: Any) -> None:
    local = tiny.make_store(tmp_path / "local", [6] * 12)
    plan = Plan.sample_users(
        num_users=12,
        expected_cohort_size=6,
        group_size=2,
        steps=3,
        clip_norm=0.5,
        noise_multiplier=1.0,
        delta=1e-2,
    )
    remote_store = UserStore.open(uploaded(local, "memory://bucket/store"), home=tmp_path / "home")
    ended = []
    for store in (local, remote_store):
        model, tokenizer = tiny.make_model(tmp_path / "model")
        secret = RunSecret.fixed_for_tests(0)
        run = train(model, tokenizer, store, plan, sequence_length=16, secret=secret)
        assert run.ledger.steps == 3
        ended.append([parameter.detach().clone() for parameter in model.parameters()])
    for a, b in zip(*ended, strict=True):
        assert bool((a == b).all())
