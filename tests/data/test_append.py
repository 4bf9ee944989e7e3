"""`userdp import --append`: old and new records of one person are one user's, in one budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli_runner import userdp
from userdp import Adjacency, Population, UserStore
from userdp.accounting.events import DpEvent
from userdp.data import split
from userdp.data.store import UserStore as Store


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(*users: str) -> list[dict[str, Any]]:
    return [{"user": user, "text": f"text {i} of {user}"} for i, user in enumerate(users)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    old = write(tmp_path / "old.jsonl", lines("ann", "bob", "ann"))
    assert userdp("import", old, "--out", tmp_path / "old").code == 0
    write(tmp_path / "new.jsonl", lines("cid", " Ann", "dora"))
    return tmp_path


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_old_and_new_records_of_one_person_are_one_users(root: Path) -> None:
    found = userdp(
        "import", root / "new.jsonl", "--out", root / "all", "--append", root / "old", "--json"
    ).json
    assert (found["records"], found["users"], found["edges"]) == (6, 4, 6)
    whole, old = UserStore.open(root / "all"), UserStore.open(root / "old")
    whole.verify()
    assert [whole.text(i) for i in range(6)] == [
        *("text 0 of ann", "text 1 of bob", "text 2 of ann"),
        *("text 0 of cid", "text 1 of  Ann", "text 2 of dora"),
    ]
    assert whole.records_of(0).tolist() == [0, 2, 4]
    assert whole.shares_users_with(old) == 2
    assert whole.fingerprint != old.fingerprint


def test_both_stores_share_one_budget(root: Path, gaussian: DpEvent) -> None:
    Population.of(UserStore.open(root / "old")).debit("first", gaussian, Adjacency.ADD_REMOVE)
    userdp("import", root / "new.jsonl", "--out", root / "all", "--append", root / "old")
    whole = Population.of(UserStore.open(root / "all"))
    whole.debit("second", gaussian, Adjacency.ADD_REMOVE)
    for name in ("old", "all"):
        entries = Population.of(UserStore.open(root / name)).entries(1e-6)
        assert [entry["what"] for entry in entries] == ["first", "second"]
    assert not (root / "all.population").exists()


@pytest.fixture
def gaussian() -> DpEvent:
    from dp_accounting import dp_event

    return dp_event.GaussianDpEvent(9.0)


def test_cautions_and_splits_are_inherited(root: Path) -> None:
    old = Store.open(root / "old")
    split.write_subset(old, np.arange(2), root / "part", made_by="a coin", cautions=["cut"])
    options = ("--append", root / "part", "--key", root / "secret" / "old.key")
    assert userdp("import", root / "new.jsonl", "--out", root / "all", *options).code == 0
    whole = Store.open(root / "all")
    assert (whole.cautions, whole.user_splits) == (("cut",), ("a coin",))


@pytest.mark.parametrize(
    "options",
    ["--key {root}/other.key", "--ids exact", "--key {root}/none.key", "--append {root}/none"],
)
def test_another_key_rule_or_parent_is_refused_and_nothing_is_left(
    root: Path, options: str
) -> None:
    (root / "other.key").write_bytes(bytes(range(32)))
    before = contents(root)
    command = ["import", root / "new.jsonl", "--out", root / "all", "--append", root / "old"]
    result = userdp(*command, *options.format(root=root).split())
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert contents(root) == before


def test_chats_are_not_appended_to_plain_text(root: Path) -> None:
    chat = {"user": "eve", "messages": [{"role": "user", "content": "hello"}]}
    write(root / "chat.jsonl", [chat])
    result = userdp("import", root / "chat.jsonl", "--out", root / "all", "--append", root / "old")
    assert result.code == 2
    assert not (root / "all").exists()


def test_a_changed_parent_is_refused(root: Path) -> None:
    owners = root / "old" / "record_users.npy"
    owners.write_bytes(owners.read_bytes()[:-8] + bytes([1, 0, 0, 0, 0, 0, 0, 0]))
    result = userdp("import", root / "new.jsonl", "--out", root / "all", "--append", root / "old")
    assert result.code == 2
    assert "changed since the import" in result.err
