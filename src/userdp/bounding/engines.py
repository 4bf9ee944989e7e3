"""The query engines that bounding in rounds runs on: DuckDB on one machine, Spark on many.

Queries are Ibis expressions, translated to the engine's SQL; an engine only stores, counts and
fetches. All of them keep their tables in a given folder and leave nothing behind.
"""

# Neither engine has type stubs, and Ibis infers columns at run time.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import ibis
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from userdp.errors import InputError

Column = NDArray[np.signedinteger[Any]]

# DuckDB writes its memory limit as a number and one of these.
_UNITS = {"bytes": 1} | {f"{prefix}iB": 1 << 10 * (i + 1) for i, prefix in enumerate("KMGTP")}

# The largest state of a group in any round: a flag, a count and a bit set, rounded up.
_COUNTER_BYTES = 32


class Engine(StrEnum):
    """Where the rounds run."""

    DUCKDB = "duckdb"
    SPARK = "spark"


class Database(Protocol):
    """What bounding in rounds asks of an engine."""

    def run(self, sql: str) -> None:
        """Run a statement to its end."""
        ...

    @property
    def join_range(self) -> int | None:
        """Numbers up to how many keys the engine joins fastest, if there is such a limit."""
        ...

    def store(self, name: str, expression: Any, filter_last: bool = False) -> Any:
        """The rows of an expression as a new table, computed now.

        With `filter_last` an engine that would filter while it joins is asked to join first.
        """
        ...

    def count(self, table: Any) -> int:
        """The number of rows."""
        ...

    def fetch(self, table: Any) -> list[Column]:
        """The columns, in one consistent order of rows."""
        ...

    def drop(self, *names: str) -> None:
        """Drop tables."""
        ...

    def load(self, rows: pa.Table, name: str) -> Any:
        """A table with the given rows."""
        ...

    def held_bytes(self) -> int:
        """The bytes that the tables take now, in memory and on disk together."""
        ...


@dataclass(frozen=True)
class DuckDB:
    """One DuckDB connection; beyond its memory limit it works on disk."""

    connection: Any

    def run(self, sql: str) -> None:
        """Run a statement to its end."""
        self.connection.execute(sql).fetchall()

    @property
    def join_range(self) -> int:
        """Keys within a million are looked up in an array, which half of that keeps in cache."""
        return 1 << 19

    def store(self, name: str, expression: Any, filter_last: bool = False) -> Any:
        """The rows of an expression as a new table, computed now."""
        # DuckDB would make a filter over columns of both sides part of the join, and then looks
        # keys up in a hash table instead of an array: that takes twice as long.
        if filter_last:
            self.run("SET disabled_optimizers = 'filter_pushdown'")
        self.run(f"CREATE TABLE {name} AS {_sql(expression.op(), 'duckdb')}")
        if filter_last:
            self.run("RESET disabled_optimizers")
        return ibis.table(expression.schema(), name=name)

    def count(self, table: Any) -> int:
        """The number of rows."""
        query = f"SELECT count(*) FROM {table.get_name()}"
        return int(self.connection.execute(query).fetchall()[0][0])

    def fetch(self, table: Any) -> list[Column]:
        """The columns, in one consistent order of rows."""
        # By way of Arrow, which takes a quarter of the time of DuckDB's own conversion.
        found = self.connection.sql(_sql(table.op(), "duckdb")).to_arrow_table()
        return [np.ascontiguousarray(found.column(name)) for name in table.columns]

    def drop(self, *names: str) -> None:
        """Drop tables."""
        for name in names:
            self.run(f"DROP TABLE {name}")

    def load(self, rows: pa.Table, name: str) -> Any:
        """A table with the given rows."""
        # DuckDB knows the range of a column of its own tables only, and needs it below.
        self.connection.register("userdp_arrow", rows)
        self.run(f"CREATE TABLE {name} AS SELECT * FROM userdp_arrow")
        self.connection.unregister("userdp_arrow")
        return ibis.table(ibis.Schema.from_pyarrow(rows.schema), name=name)

    def held_bytes(self) -> int:
        """The bytes that the tables take now, in memory and on disk together."""
        query = "SELECT sum(memory_usage_bytes + temporary_storage_bytes) FROM duckdb_memory()"
        return int(self.connection.execute(query).fetchall()[0][0])


@dataclass(frozen=True)
class Spark:
    """One Spark session; tables are Parquet in its warehouse, a local folder or a mounted one."""

    session: Any
    warehouse: Path

    def run(self, sql: str) -> None:
        """Run a statement to its end."""
        self.session.sql(sql)

    @property
    def join_range(self) -> None:
        """None: Spark splits joins by itself."""
        return

    def store(self, name: str, expression: Any, filter_last: bool = False) -> Any:
        """The rows of an expression as a new table, computed now."""
        query = _sql(expression.op(), "pyspark")
        self.run(f"CREATE TABLE {name} USING parquet AS {query}")
        return ibis.table(expression.schema(), name=name)

    def count(self, table: Any) -> int:
        """The number of rows."""
        return int(self.session.sql(f"SELECT count(*) FROM {table.get_name()}").first()[0])

    def fetch(self, table: Any) -> list[Column]:
        """The columns, in one consistent order of rows."""
        found = self.session.sql(_sql(table.op(), "pyspark")).toArrow()
        return [np.ascontiguousarray(found.column(name)) for name in table.columns]

    def drop(self, *names: str) -> None:
        """Drop tables."""
        for name in names:
            self.run(f"DROP TABLE {name}")

    def load(self, rows: pa.Table, name: str) -> Any:
        """A view of the given rows, kept beside the warehouse."""
        path = self.warehouse.parent / f"{name}.parquet"
        pq.write_table(rows, path, compression="none", use_dictionary=False)
        self.session.read.parquet(str(path)).createOrReplaceTempView(name)
        return ibis.table(ibis.Schema.from_pyarrow(rows.schema), name=name)

    def held_bytes(self) -> int:
        """The bytes that the tables take now, in memory and on disk together."""
        return sum(file.stat().st_size for file in self.warehouse.rglob("*") if file.is_file())


@lru_cache(maxsize=256)
def _sql(operation: Any, dialect: str) -> str:
    """An expression in the engine's SQL; translating takes as long as a small query."""
    return str(ibis.to_sql(operation.to_expr(), dialect=dialect))


@contextmanager
def connect(engine: Engine, folder: Path, *, memory_limit: str) -> Generator[Database]:
    """A fresh database that keeps its tables in `folder`."""
    if engine is Engine.SPARK:
        with _spark_session(folder) as session:
            yield Spark(session, folder / "warehouse")
        return
    import duckdb

    # Tables in memory, too, go to the temporary directory once they do not fit.
    settings: dict[str, Any] = {"memory_limit": memory_limit, "temp_directory": str(folder)}
    try:
        connection = duckdb.connect(":memory:", config=settings)
    except duckdb.Error as error:
        raise InputError(
            f"DuckDB does not start with memory_limit={memory_limit!r}: give a size such as 4GB."
        ) from error
    try:
        _count_by_place(connection)
        yield DuckDB(connection)
    finally:
        connection.close()


def _count_by_place(connection: Any) -> None:
    """Let DuckDB count by consecutive numbers in an array of counters, not in a hash table.

    Its array is never written to disk, so all threads' arrays may take a quarter of the memory.
    """
    query = "SELECT current_setting('memory_limit'), current_setting('threads')"
    ((limit, threads),) = connection.execute(query).fetchall()
    number, unit = str(limit).split()
    counters = float(number) * _UNITS[unit] / (4 * _COUNTER_BYTES * int(threads))
    bits = min(30, max(12, int(math.log2(counters))))
    connection.execute(f"SET perfect_ht_threshold = {bits}")


@contextmanager
def _spark_session(folder: Path) -> Generator[Any]:
    try:
        from pyspark.sql import SparkSession  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InputError(
            "the engine spark needs PySpark and Java: install userdp[spark], or use duckdb."
        ) from error
    # Under spark-submit or in a notebook a session exists, with its own warehouse: keep it.
    active = SparkSession.getActiveSession()
    if active is not None:
        yield active
        return
    session = (
        SparkSession.builder.appName("userdp bound")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    try:
        yield session
    finally:
        session.stop()
