"""`userdp stats`: what is counted, what is said, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli.test_import import GOOD, USER, line
from cli_runner import answer, userdp
from shared import SHARED, needs_shared

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
    answer("import", SHARED / "data" / f"{name}.jsonl.gz", "--out", tmp_path / "store")
    stats = answer("stats", tmp_path / "store")
    assert (stats["records"], stats["users"], stats["text_bytes"]) == (records, users, text_bytes)
    assert as_table(stats["records_per_user"]) == per_user
    assert as_table(stats["users_per_record"]) == per_record


@pytest.fixture
def small_store(tmp_path: Path) -> Path:
    source = tmp_path / "data.jsonl"
    source.write_bytes(GOOD + line(["ann", USER]))
    assert userdp("import", source, "--out", tmp_path / "store").code == 0
    return tmp_path / "store"


def test_stats_counts_what_is_there(small_store: Path) -> None:
    data = userdp("stats", small_store, "--json").json
    assert (data["records"], data["users"]) == (4, 3)
    per_user = {"min": 1, "median": 1.0, "mean": 5 / 3, "max": 3}
    per_record = {"min": 1, "median": 1.0, "mean": 1.25, "max": 2}
    assert data["records_per_user"] == data["records_per_user"] | per_user
    assert data["users_per_record"] == data["users_per_record"] | per_record


def test_stats_in_words_has_a_histogram_and_a_warning(small_store: Path) -> None:
    result = userdp("stats", small_store)
    assert "records per user" in result.out
    assert "\u2588" in result.out
    assert "private" in result.out
    assert USER not in result.out


def test_stats_of_a_changed_store_is_refused(small_store: Path) -> None:
    largest = max(
        (path for path in small_store.rglob("*") if path.is_file() and path.suffix != ".json"),
        key=lambda path: path.stat().st_size,
    )
    with largest.open("ab") as file:
        file.write(b"x")
    result = userdp("stats", small_store)
    assert result.code == 2
    assert "changed since the import" in result.err
