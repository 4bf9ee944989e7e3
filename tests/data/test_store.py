"""The user store: what is written is what is read, and nothing names anybody."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cli_runner import answer, python
from stores import KEY, write_lines
from userdp.data.record import Record
from userdp.data.store import UserStore, write_store
from userdp.errors import InputError

MakeStore = Callable[[list[Record]], UserStore]

RECORDS = [
    Record("first text", ("ann-unique-id",), "1"),
    Record("second text", ("bob-unique-id", "ann-unique-id"), "2"),
    Record("third \u00e9\u4e2d text", ("bob-unique-id",), "3"),
]


def test_store_reads_back_as_it_was_written(make_store: MakeStore) -> None:
    store = make_store(RECORDS)
    assert (store.num_records, store.num_users) == (3, 2)
    assert [store.text(record) for record in range(3)] == [record.text for record in RECORDS]
    assert store.users_per_record().tolist() == [1, 2, 1]
    assert store.records_per_user().tolist() == [2, 2]
    assert [store.records_of(user).tolist() for user in range(2)] == [[0, 1], [1, 2]]


def test_store_holds_no_user_id(make_store: MakeStore) -> None:
    store = make_store(RECORDS)
    for path in store.path.rglob("*"):
        if path.is_file():
            assert b"unique-id" not in path.read_bytes()


def test_fingerprint_names_texts_and_edges(make_store: MakeStore) -> None:
    same = make_store(RECORDS).fingerprint
    other_text = [Record("first texT", RECORDS[0].owners, "1"), *RECORDS[1:]]
    other_owner = [Record("first text", ("bob-unique-id",), "1"), *RECORDS[1:]]
    assert make_store(RECORDS).fingerprint == same
    assert make_store(other_text).fingerprint != same
    assert make_store(other_owner).fingerprint != same


def test_boundaries_between_texts_enter_the_fingerprint(make_store: MakeStore) -> None:
    ab, ba = ("ab", "c"), ("a", "bc")
    prints = {make_store([Record(t, ("u",), "1") for t in texts]).fingerprint for texts in (ab, ba)}
    assert len(prints) == 2


def test_file_of_another_size_is_refused_on_opening(make_store: MakeStore) -> None:
    store = make_store(RECORDS)
    largest = max(
        (path for path in store.path.rglob("*") if path.is_file() and path.suffix != ".json"),
        key=lambda path: path.stat().st_size,
    )
    with largest.open("ab") as file:
        file.write(b"x")
    with pytest.raises(InputError, match="changed since the import"):
        UserStore.open(store.path)


def test_changed_byte_is_found_by_verification(make_store: MakeStore) -> None:
    store = make_store(RECORDS)
    store.verify()
    path = next(p for p in sorted(store.path.rglob("*")) if b"second text" in p.read_bytes())
    path.write_bytes(path.read_bytes().replace(b"second text", b"sEcond text"))
    with pytest.raises(InputError, match="changed since the import"):
        UserStore.open(store.path).verify()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": 99}'])
def test_broken_manifest_is_refused(make_store: MakeStore, content: str) -> None:
    store = make_store(RECORDS)
    (store.path / "manifest.json").write_text(content)
    with pytest.raises(InputError, match=str(store.path.name)):
        UserStore.open(store.path)


def test_a_manifest_without_a_checksum_is_refused(make_store: MakeStore) -> None:
    path = make_store(RECORDS).path
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]["users.arrow"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="damaged"):
        UserStore.open(path)


def test_directory_that_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a user store"):
        UserStore.open(tmp_path)


def test_existing_output_is_never_touched(tmp_path: Path) -> None:
    out = tmp_path / "store"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="exists"):
        write_store(RECORDS, out, key=KEY)
    assert [path.name for path in tmp_path.rglob("*")] == ["store", "mine.txt"]


def test_failure_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    def broken():  # type: ignore[no-untyped-def]
        yield from RECORDS
        raise InputError("file, line 4: broken")

    with pytest.raises(InputError, match="line 4"):
        write_store(broken(), tmp_path / "store", key=KEY)
    assert list(tmp_path.iterdir()) == []


def test_stores_of_one_key_can_be_compared_and_others_cannot(
    make_store: MakeStore, tmp_path: Path
) -> None:
    ours = make_store(RECORDS)
    theirs = make_store([Record("x", ("bob-unique-id",), "1"), Record("y", ("cy",), "2")])
    assert ours.shares_users_with(theirs) == 1
    write_store(RECORDS, tmp_path / "foreign", key=b"z" * 32)
    assert ours.shares_users_with(UserStore.open(tmp_path / "foreign")) is None


def test_sole_owners_need_one_owner_a_record(make_store: MakeStore) -> None:
    with pytest.raises(InputError, match="1 of 3 records have several owners"):
        make_store(RECORDS).sole_owners()
    alone = make_store([RECORDS[0], RECORDS[2]])
    assert alone.sole_owners().tolist() == [0, 1]


def test_manifest_is_plain_json_with_counts(make_store: MakeStore) -> None:
    manifest = json.loads((make_store(RECORDS).path / "manifest.json").read_text())
    assert (manifest["records"], manifest["users"], manifest["edges"]) == (3, 2, 4)


def test_opening_a_store_loads_neither_torch_nor_engines(tmp_path: Path) -> None:
    answer("import", write_lines(tmp_path / "data.jsonl"), "--out", tmp_path / "store")
    script = (
        "import sys; from userdp.data.store import UserStore; UserStore.open('store').text(0);"
        "print([name for name in ('torch', 'duckdb', 'ibis', 'pyspark') if name in sys.modules])"
    )
    done = python(script, cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
