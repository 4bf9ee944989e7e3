"""The query engines that bounding in rounds runs on: DuckDB on one machine, Spark on many.

Queries are Ibis expressions, translated to the engine's SQL; an engine only stores, counts and
fetches. All of them keep their tables in a given folder and leave nothing behind.
"""

# Neither engine has type stubs, and Ibis infers columns at run time.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import ibis
import numpy as np
import pyarrow.parquet as pq

from userdp.bounding.edges import Ints
from userdp.errors import InputError


class Engine(StrEnum):
    """Where the rounds run."""

    DUCKDB = "duckdb"
    SPARK = "spark"


class Database(Protocol):
    """What bounding in rounds asks of an engine."""

    def run(self, sql: str) -> None:
        """Run a statement to its end."""
        ...

    def store(self, name: str, expression: Any) -> Any:
        """The rows of an expression as a new table, computed now."""
        ...

    def count(self, table: Any) -> int:
        """The number of rows."""
        ...

    def fetch(self, table: Any) -> list[Ints]:
        """The columns, in one consistent order of rows."""
        ...

    def read_parquet(self, path: Path, name: str) -> Any:
        """A view of a Parquet file."""
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

    def store(self, name: str, expression: Any) -> Any:
        """The rows of an expression as a new table, computed now."""
        self.run(f"CREATE TABLE {name} AS {ibis.to_sql(expression, dialect='duckdb')}")
        return ibis.table(expression.schema(), name=name)

    def count(self, table: Any) -> int:
        """The number of rows."""
        query = ibis.to_sql(table.count(), dialect="duckdb")
        return int(self.connection.execute(query).fetchone()[0])

    def fetch(self, table: Any) -> list[Ints]:
        """The columns, in one consistent order of rows."""
        found = self.connection.execute(ibis.to_sql(table, dialect="duckdb")).fetchnumpy()
        return [np.asarray(found[name], dtype=np.int64) for name in table.columns]

    def read_parquet(self, path: Path, name: str) -> Any:
        """A view of a Parquet file."""
        quoted = str(path).replace("'", "''")
        self.run(f"CREATE VIEW {name} AS SELECT * FROM read_parquet('{quoted}')")
        return ibis.table(_schema(path), name=name)

    def held_bytes(self) -> int:
        """The bytes that the tables take now, in memory and on disk together."""
        query = "SELECT sum(memory_usage_bytes + temporary_storage_bytes) FROM duckdb_memory()"
        return int(self.connection.execute(query).fetchone()[0])


@dataclass(frozen=True)
class Spark:
    """One Spark session; tables are Parquet in its warehouse, a local folder or a mounted one."""

    session: Any
    warehouse: Path

    def run(self, sql: str) -> None:
        """Run a statement to its end."""
        self.session.sql(sql)

    def store(self, name: str, expression: Any) -> Any:
        """The rows of an expression as a new table, computed now."""
        query = ibis.to_sql(expression, dialect="pyspark")
        self.run(f"CREATE TABLE {name} USING parquet AS {query}")
        return ibis.table(expression.schema(), name=name)

    def count(self, table: Any) -> int:
        """The number of rows."""
        return int(self.session.sql(ibis.to_sql(table.count(), dialect="pyspark")).first()[0])

    def fetch(self, table: Any) -> list[Ints]:
        """The columns, in one consistent order of rows."""
        found = self.session.sql(ibis.to_sql(table, dialect="pyspark")).toArrow()
        return [np.asarray(found.column(name), dtype=np.int64) for name in table.columns]

    def read_parquet(self, path: Path, name: str) -> Any:
        """A view of a Parquet file."""
        self.session.read.parquet(str(path)).createOrReplaceTempView(name)
        return ibis.table(_schema(path), name=name)

    def held_bytes(self) -> int:
        """The bytes that the tables take now, in memory and on disk together."""
        return sum(file.stat().st_size for file in self.warehouse.rglob("*") if file.is_file())


def _schema(path: Path) -> Any:
    return ibis.Schema.from_pyarrow(pq.read_schema(path))


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
        yield DuckDB(connection)
    finally:
        connection.close()


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
