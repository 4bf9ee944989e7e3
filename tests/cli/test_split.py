"""`userdp split`: two stores or none, and nobody lost without a word."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli_runner import answer
from stores import write_lines
from userdp.cli import app
from userdp.data import split
from userdp.data.store import UserStore
from userdp.errors import InputError


def test_a_split_into_one_directory_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    answer("import", write_lines(tmp_path / "data.jsonl"), "--out", tmp_path / "store")
    before = sorted(tmp_path.iterdir())
    (tmp_path / "link").symlink_to(tmp_path)
    for train, held_out in (("a", "a"), ("a", "link/a"), ("a/b", "a"), ("a", "a/b")):
        sides = ("--train", tmp_path / train, "--held-out", tmp_path / held_out)
        with pytest.raises(InputError, match="two directories"):
            answer("split", tmp_path / "store", "--share", 0.5, *sides)
    (tmp_path / "link").unlink()
    assert sorted(tmp_path.iterdir()) == before


def test_half_a_split_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer("import", write_lines(tmp_path / "data.jsonl"), "--out", tmp_path / "store")
    whole = split.write_subset

    def fails_at_the_second(store: UserStore, records: Any, out: Path, **options: Any) -> Any:
        if out.name == "b":
            raise OSError("no space left")
        return whole(store, records, out, **options)

    monkeypatch.setattr(split, "write_subset", fails_at_the_second)
    with pytest.raises(OSError, match="no space"):
        answer(
            *("split", tmp_path / "store", "--share", 0.5),
            *("--train", tmp_path / "a", "--held-out", tmp_path / "b"),
        )
    assert not (tmp_path / "a").exists()


def test_split_says_which_users_are_lost(tmp_path: Path) -> None:
    lines = [{"user": [f"u{i}", f"u{i + 1}", f"u{i + 2}"], "text": f"text {i}"} for i in range(200)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer(
        "import", tmp_path / "data.jsonl", "--out", tmp_path / "store", "--key", tmp_path / "key"
    )
    (tmp_path / "key").unlink()
    paths = ("--train", str(tmp_path / "a"), "--held-out", str(tmp_path / "b"))
    result = CliRunner().invoke(app, ["split", str(tmp_path / "store"), "--share", "0.4", *paths])
    table = re.findall(
        r"^(training|held out|in neither) +(\d+) +(\d+)", result.stdout, re.MULTILINE
    )
    told = {name: (int(records), int(users)) for name, records, users in table}
    stores = {name: UserStore.open(tmp_path / name) for name in "ab"}
    assert told["training"] == (stores["a"].num_records, stores["a"].num_users)
    assert told["held out"] == (stores["b"].num_records, stores["b"].num_users)
    assert sum(records for records, _ in told.values()) == 200
    assert sum(users for _, users in told.values()) == 202
    assert told["in neither"][1] > 0


def test_sharing_users_must_be_asked_for(tmp_path: Path) -> None:
    answer("import", write_lines(tmp_path / "data.jsonl"), "--out", tmp_path / "store")
    sides = ("--train", tmp_path / "a", "--held-out", tmp_path / "b")
    with pytest.raises(InputError, match="puts users on both sides"):
        answer("split", tmp_path / "store", "--by", "beginning", *sides)
    halves = answer(
        "split", tmp_path / "store", "--by", "beginning", "--allow-shared-users", *sides
    )
    assert halves["shares_users"]
    assert halves["held_out"]["records"] == 10
