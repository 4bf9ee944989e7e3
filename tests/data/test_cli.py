from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli_runner import python
from shared import SHARED, needs_shared
from userdp.cli import app
from userdp.data import split
from userdp.data.store import UserStore
from userdp.errors import InputError

# The tables of the data folder: records, users, then min/median/mean/max of both directions.
TABLES: dict[str, tuple[int, int, str, str, int]] = {
    "acl_to2022": (81239, 70126, "1/1/3.763/345", "1/3/3.248/95", 42406736),
    "acl_small_2016": (4122, 7673, "1/1/1.793/39", "1/3/3.338/23", 1992331),
    "gitml_2022_2023": (39012, 1590, "1/5/114.532/24497", "1/4/4.668/36", 38442138),
    "gitml_2005-04_05": (4261, 295, "1/6/40.173/2257", "1/2/2.781/10", 3204647),
    "peps_sections": (9816, 366, "1/22/48.623/1005", "1/1/1.813/28", 12697782),
    "shakespeare_plays": (30876, 1370, "1/7/22.537/359", "1/1/1/1", 4269444),
    "tinyshakespeare": (7097, 293, "1/9/24.222/211", "1/1/1/1", 1020755),
    "scotus_turns_2006_2010": (83014, 504, "6/52/164.71/8320", "1/1/1/1", 21374890),
    "scotus_exchanges_2006_2010": (12737, 504, "4/16/68.865/4842", "1/3/2.725/7", 21654343),
    "books_by_author_chunks": (27395, 169, "12/174/162.101/245", "1/1/1/1", 47422264),
    "stackexchange_beer_posts": (2225, 781, "1/1/2.849/57", "1/1/1/1", 1480868),
    "stackexchange_beer_threads": (663, 781, "1/1/2.805/57", "1/3/3.305/33", 1495019),
    "stackexchange_history_meta_posts": (4905, 383, "1/3/12.807/586", "1/1/1/1", 2288559),
    "stackexchange_history_meta_threads": (556, 383, "1/1/6.608/277", "1/4/4.552/17", 2411528),
}


def run(*arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    if result.exception is not None:
        raise result.exception
    return json.loads(result.stdout)


def as_table(summary: dict[str, Any]) -> str:
    return "/".join(
        f"{round(summary[name], 3):g}" if name != "max" else str(summary[name])
        for name in ("min", "median", "mean", "max")
    )


# Of the largest, those that others in the table are like take long and say little more.
SLOW_TABLES = frozenset(
    "acl_to2022 gitml_2022_2023 books_by_author_chunks scotus_turns_2006_2010".split()
)


@needs_shared
@pytest.mark.parametrize(
    "name",
    [pytest.param(t, marks=pytest.mark.slow) if t in SLOW_TABLES else t for t in TABLES],
)
def test_stats_give_the_table_of_the_data_folder(tmp_path: Path, name: str) -> None:
    records, users, per_user, per_record, text_bytes = TABLES[name]
    run("import", SHARED / "data" / f"{name}.jsonl.gz", "--out", tmp_path / "store")
    stats = run("stats", tmp_path / "store")
    assert (stats["records"], stats["users"], stats["text_bytes"]) == (records, users, text_bytes)
    assert as_table(stats["records_per_user"]) == per_user
    assert as_table(stats["users_per_record"]) == per_record


def write(path: Path) -> Path:
    path.write_text(
        "".join(
            json.dumps({"user": f"u{i % 10}", "text": f"some words of text {i % 40}"}) + "\n"
            for i in range(80)
        )
    )
    return path


def test_import_split_duplicates_and_stats_work_together(tmp_path: Path) -> None:
    source = write(tmp_path / "data.jsonl")
    key = tmp_path / "ids.key"
    run("import", source, "--out", tmp_path / "store", "--key", key)
    halves = run(
        *("split", tmp_path / "store", "--share", 0.2),
        *("--train", tmp_path / "train", "--held-out", tmp_path / "held"),
    )
    assert halves["train"]["users"] + halves["held_out"]["users"] == 10
    found = run("duplicates", tmp_path / "store", "--out", tmp_path / "unique")
    assert (found["copies"], found["kept"], found["cautions"]) == (40, 40, [])
    against = run("duplicates", tmp_path / "store", "--against", source)
    assert against["public_in_store"] == 80
    assert run("stats", tmp_path / "unique", "--verify")["records"] == 40


def test_a_split_into_one_directory_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    run("import", write(tmp_path / "data.jsonl"), "--out", tmp_path / "store")
    before = sorted(tmp_path.iterdir())
    (tmp_path / "link").symlink_to(tmp_path)
    for train, held_out in (("a", "a"), ("a", "link/a"), ("a/b", "a"), ("a", "a/b")):
        sides = ("--train", tmp_path / train, "--held-out", tmp_path / held_out)
        with pytest.raises(InputError, match="two directories"):
            run("split", tmp_path / "store", "--share", 0.5, *sides)
    (tmp_path / "link").unlink()
    assert sorted(tmp_path.iterdir()) == before


def test_half_a_split_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("import", write(tmp_path / "data.jsonl"), "--out", tmp_path / "store")
    whole = split.write_subset

    def fails_at_the_second(store: UserStore, records: Any, out: Path, **options: Any) -> Any:
        if out.name == "b":
            raise OSError("no space left")
        return whole(store, records, out, **options)

    monkeypatch.setattr(split, "write_subset", fails_at_the_second)
    with pytest.raises(OSError, match="no space"):
        run(
            *("split", tmp_path / "store", "--share", 0.5),
            *("--train", tmp_path / "a", "--held-out", tmp_path / "b"),
        )
    assert not (tmp_path / "a").exists()


def test_split_says_which_users_are_lost(tmp_path: Path) -> None:
    lines = [{"user": [f"u{i}", f"u{i + 1}", f"u{i + 2}"], "text": f"text {i}"} for i in range(200)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run("import", tmp_path / "data.jsonl", "--out", tmp_path / "store", "--key", tmp_path / "key")
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


def test_removal_across_users_leaves_its_caution_in_every_store_made_from_it(
    tmp_path: Path,
) -> None:
    run("import", write(tmp_path / "data.jsonl"), "--out", tmp_path / "store")
    found = run("duplicates", tmp_path / "store", "--across-users", "--out", tmp_path / "unique")
    assert (found["clusters"], found["copies"]) == (40, 40)
    assert ["other users had like ones" in caution for caution in found["cautions"]] == [True]
    parts = ("--train", tmp_path / "train", "--held-out", tmp_path / "held")
    run("split", tmp_path / "unique", "--share", 0.5, *parts)
    run("duplicates", tmp_path / "train", "--out", tmp_path / "again")
    for name in ("train", "held", "again"):
        assert list(UserStore.open(tmp_path / name).cautions) == found["cautions"]
    assert run("stats", tmp_path / "again")["cautions"] == found["cautions"]
    look = run("quantile", tmp_path / "again", "--epsilon", 1)
    assert look["cautions"] == found["cautions"]
    for command in (["stats"], ["quantile", "--epsilon", "1"]):
        words = CliRunner().invoke(app, [*command, str(tmp_path / "again")]).stdout
        assert f"caution: {found['cautions'][0]}" in words


def test_records_of_several_owners_are_removed_only_with_a_caution(tmp_path: Path) -> None:
    lines = [{"user": ["a", "b"], "text": "one two three"}] * 3 + [{"user": ["c"], "text": "four"}]
    source = tmp_path / "data.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run("import", source, "--out", tmp_path / "store")
    assert run("duplicates", tmp_path / "store")["copies"] == 2
    for options in ((), ("--against", source)):
        with pytest.raises(InputError, match="several owners"):
            run("duplicates", tmp_path / "store", *options, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    run("duplicates", tmp_path / "store", "--across-users", "--out", tmp_path / "out")
    assert any("of several owners" in text for text in UserStore.open(tmp_path / "out").cautions)


def test_sharing_users_must_be_asked_for(tmp_path: Path) -> None:
    run("import", write(tmp_path / "data.jsonl"), "--out", tmp_path / "store")
    sides = ("--train", tmp_path / "a", "--held-out", tmp_path / "b")
    with pytest.raises(InputError, match="puts users on both sides"):
        run("split", tmp_path / "store", "--by", "beginning", *sides)
    halves = run("split", tmp_path / "store", "--by", "beginning", "--allow-shared-users", *sides)
    assert halves["shares_users"]
    assert halves["held_out"]["records"] == 10


def test_failed_import_leaves_no_key_either(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"user": "a", "text": "x"}\n{"user": "a", "t\n')
    with pytest.raises(InputError, match="line 2"):
        run("import", tmp_path / "data.jsonl", "--out", tmp_path / "store")
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


def test_unknown_formats_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data.unknown").write_text("x")
    with pytest.raises(InputError, match="format cannot be told"):
        run("import", tmp_path / "data.unknown", "--out", tmp_path / "store")
    with pytest.raises(InputError, match="no such file"):
        run("import", tmp_path / "none.jsonl", "--out", tmp_path / "store")


def test_opening_a_store_loads_neither_torch_nor_engines(tmp_path: Path) -> None:
    run("import", write(tmp_path / "data.jsonl"), "--out", tmp_path / "store")
    script = (
        "import sys; from userdp.data.store import UserStore; UserStore.open('store').text(0);"
        "print([name for name in ('torch', 'duckdb', 'ibis', 'pyspark') if name in sys.modules])"
    )
    done = python(script, cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
