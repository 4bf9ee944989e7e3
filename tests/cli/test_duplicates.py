"""`userdp duplicates`, and the cautions that it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli_runner import answer
from stores import write_lines
from userdp.cli import app
from userdp.data.store import UserStore
from userdp.errors import InputError


def test_import_split_duplicates_and_stats_work_together(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "data.jsonl")
    key = tmp_path / "ids.key"
    answer("import", source, "--out", tmp_path / "store", "--key", key)
    halves = answer(
        *("split", tmp_path / "store", "--share", 0.2),
        *("--train", tmp_path / "train", "--held-out", tmp_path / "held"),
    )
    assert halves["train"]["users"] + halves["held_out"]["users"] == 10
    found = answer("duplicates", tmp_path / "store", "--out", tmp_path / "unique")
    assert (found["copies"], found["kept"], found["cautions"]) == (40, 40, [])
    against = answer("duplicates", tmp_path / "store", "--against", source)
    assert against["public_in_store"] == 80
    assert answer("stats", tmp_path / "unique", "--verify")["records"] == 40


def test_removal_across_users_leaves_its_caution_in_every_store_made_from_it(
    tmp_path: Path,
) -> None:
    answer("import", write_lines(tmp_path / "data.jsonl"), "--out", tmp_path / "store")
    found = answer("duplicates", tmp_path / "store", "--across-users", "--out", tmp_path / "unique")
    assert (found["clusters"], found["copies"]) == (40, 40)
    assert ["other users had like ones" in caution for caution in found["cautions"]] == [True]
    parts = ("--train", tmp_path / "train", "--held-out", tmp_path / "held")
    answer("split", tmp_path / "unique", "--share", 0.5, *parts)
    answer("duplicates", tmp_path / "train", "--out", tmp_path / "again")
    for name in ("train", "held", "again"):
        assert list(UserStore.open(tmp_path / name).cautions) == found["cautions"]
    assert answer("stats", tmp_path / "again")["cautions"] == found["cautions"]
    look = answer("quantile", tmp_path / "again", "--epsilon", 1)
    assert look["cautions"] == found["cautions"]
    for command in (["stats"], ["quantile", "--epsilon", "1"]):
        words = CliRunner().invoke(app, [*command, str(tmp_path / "again")]).stdout
        assert f"caution: {found['cautions'][0]}" in words


def test_records_of_several_owners_are_removed_only_with_a_caution(tmp_path: Path) -> None:
    lines = [{"user": ["a", "b"], "text": "one two three"}] * 3 + [{"user": ["c"], "text": "four"}]
    source = tmp_path / "data.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer("import", source, "--out", tmp_path / "store")
    assert answer("duplicates", tmp_path / "store")["copies"] == 2
    for options in ((), ("--against", source)):
        with pytest.raises(InputError, match="several owners"):
            answer("duplicates", tmp_path / "store", *options, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    answer("duplicates", tmp_path / "store", "--across-users", "--out", tmp_path / "out")
    assert any("of several owners" in text for text in UserStore.open(tmp_path / "out").cautions)
