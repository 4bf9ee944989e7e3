from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from userdp.data.engine import EngineName, Spark, duckdb_connection, engine_of
from userdp.errors import InputError


def test_duckdb_draws_nothing_and_fetches_nothing(tmp_path: Path) -> None:
    connection = duckdb_connection(tmp_path)
    for setting in ("enable_progress_bar", "autoinstall_known_extensions"):
        (value,) = connection.execute(f"SELECT current_setting('{setting}')").fetchone()
        assert value is False
    connection.close()


def test_held_tables_can_be_asked_again_and_empty_results_keep_their_columns(
    tmp_path: Path,
) -> None:
    pq.write_table(pa.table({"number": [3, 1, 2]}), tmp_path / "numbers.parquet")
    with engine_of(EngineName.DUCKDB, tmp_path) as engine:
        numbers = engine.add_parquet("numbers", tmp_path / "numbers.parquet")
        large = engine.hold("large", numbers.filter(numbers.number > 1))
        assert engine.fetch(large.order_by("number"))["number"].to_pylist() == [2, 3]
        none = engine.fetch(large.filter(large.number > 9))
        assert (none.num_rows, none.column_names) == (0, ["number"])


def test_spark_without_the_extra_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    with pytest.raises(InputError, match=r"userdp\[spark\]"):
        Spark(tmp_path)
