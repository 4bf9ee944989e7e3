from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shared import SHARED, needs_shared
from userdp.cli import app
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


@needs_shared
@pytest.mark.parametrize("name", TABLES)
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
    assert (halves["train"]["users"], halves["held_out"]["users"]) == (8, 2)
    found = run("duplicates", tmp_path / "store", "--out", tmp_path / "unique")
    assert (found["copies"], found["kept"]) == (40, 40)
    against = run("duplicates", tmp_path / "store", "--against", source)
    assert against["public_in_store"] == 80
    assert run("stats", tmp_path / "unique", "--verify")["records"] == 40


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
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
