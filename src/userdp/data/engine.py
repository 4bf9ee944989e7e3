"""What runs the relational work: DuckDB inside this process, or a Spark cluster.

The work is written once, as Ibis expressions over named tables; an engine has its own SQL made of
them and gives the rows back as Arrow. DuckDB spills to disk beyond `memory_limit`, so a table may
be larger than the memory. Both engines give the same rows in the same order: every expression that
is read back in order sorts by a key without ties, and all columns are whole numbers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from userdp.errors import InputError

MEMORY_LIMIT = "1500MB"
ROWS_PER_BATCH = 2**20


class EngineName(StrEnum):
    """Which engine groups, joins and counts."""

    DUCKDB = "duckdb"
    SPARK = "spark"


class Engine(Protocol):
    """Named tables, and Ibis expressions over them."""

    def add_parquet(self, name: str, path: Path) -> Any:
        """The Parquet file as a table that expressions can be built on."""
        ...

    def hold(self, name: str, expression: Any) -> Any:
        """The expression's rows, computed once, as a table."""
        ...

    def batches(self, expression: Any) -> Iterator[pa.RecordBatch]:
        """The expression's rows, in its order."""
        ...


@contextmanager
def engine_of(name: EngineName, scratch: Path) -> Generator[Engine]:
    """The engine, with `scratch` for what does not fit into memory."""
    if name is EngineName.DUCKDB:
        engine = DuckDB(scratch)
        try:
            yield engine
        finally:
            engine.close()
    else:
        engine = Spark(scratch)
        try:
            yield engine
        finally:
            engine.close()


def table_of(engine: Engine, expression: Any) -> pa.Table:
    """All rows of a small expression."""
    batches = list(engine.batches(expression))
    return (
        pa.Table.from_batches(batches)
        if batches
        else expression.schema().to_pyarrow().empty_table()
    )


def duckdb_connection(scratch: Path) -> Any:
    """A DuckDB in memory that spills into `scratch` and never loads or fetches extensions."""
    import duckdb

    connection = duckdb.connect()
    connection.execute("SET autoinstall_known_extensions = false")
    # It would draw on stdout, where only results belong.
    connection.execute("SET enable_progress_bar = false")
    connection.execute(f"SET memory_limit = '{MEMORY_LIMIT}'")
    connection.execute(f"SET threads = {len(os.sched_getaffinity(0))}")
    connection.execute(f"SET temp_directory = {quoted(str(scratch))}")
    return connection


def quoted(value: str) -> str:
    """A string as an SQL literal.

    >>> quoted("it's")
    "'it''s'"
    """
    return "'" + value.replace("'", "''") + "'"


def file_name(path: Path) -> str:
    """A path as an SQL literal that DuckDB's readers do not take for a pattern.

    >>> file_name(Path("a[1]*.parquet"))
    "'a[[]1][*].parquet'"
    """
    return quoted(re.sub(r"([*?\[])", r"[\1]", str(path)))


class DuckDB:
    """DuckDB in this process."""

    def __init__(self, scratch: Path) -> None:
        self._connection = duckdb_connection(scratch)

    def close(self) -> None:
        """Free memory and temporary files."""
        self._connection.close()

    def add_parquet(self, name: str, path: Path) -> Any:
        """The Parquet file as a table that expressions can be built on."""
        self._connection.execute(
            f"CREATE VIEW {name} AS SELECT * FROM read_parquet({file_name(path)})"
        )
        return _unbound(name, pq.read_schema(path))

    def hold(self, name: str, expression: Any) -> Any:
        """The expression's rows, computed once, as a table."""
        self._connection.execute(f"CREATE TEMP TABLE {name} AS {_sql(expression, 'duckdb')}")
        return _renamed(name, expression)

    def batches(self, expression: Any) -> Iterator[pa.RecordBatch]:
        """The expression's rows, in its order."""
        relation = self._connection.sql(_sql(expression, "duckdb"))
        yield from relation.to_arrow_reader(ROWS_PER_BATCH)


class Spark:
    """The Spark session that is running, or a local one. Rows come back through Parquet files."""

    def __init__(self, scratch: Path) -> None:
        try:
            from pyspark.sql import SparkSession  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise InputError(
                "--engine spark needs PySpark and Java 17: pip install 'userdp[spark]'."
            ) from None
        self._scratch = scratch
        self._owned = SparkSession.getActiveSession() is None
        builder: Any = SparkSession.builder
        self._session = (
            builder.appName("userdp")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.sql.ansi.enabled", "true")
            .getOrCreate()
        )
        self._session.sparkContext.setLogLevel("ERROR")
        self._views: list[str] = []

    def close(self) -> None:
        """Drop our views; stop the session if we started it."""
        for name in self._views:
            self._session.catalog.dropTempView(name)
        if self._owned:
            self._session.stop()

    def _view(self, name: str, path: Path) -> None:
        # Hadoop would read these as patterns.
        literal = re.sub(r"([\[\]{}*?\\])", r"\\\1", _uri(path))
        self._session.read.parquet(literal).createOrReplaceTempView(name)
        self._views.append(name)

    def add_parquet(self, name: str, path: Path) -> Any:
        """The Parquet file as a table that expressions can be built on."""
        self._view(name, path)
        return _unbound(name, pq.read_schema(path))

    def hold(self, name: str, expression: Any) -> Any:
        """The expression's rows, computed once, as a table."""
        path = self._scratch / f"{name}.parquet"
        self._session.sql(_sql(expression, "pyspark")).write.parquet(_uri(path))
        self._view(name, path)
        return _renamed(name, expression)

    def batches(self, expression: Any) -> Iterator[pa.RecordBatch]:
        """The expression's rows, in its order.

        Spark writes a sorted result as numbered part files, each sorted, in the order of their
        numbers.
        """
        path = self._scratch / f"result_{len(list(self._scratch.iterdir()))}.parquet"
        self._session.sql(_sql(expression, "pyspark")).write.parquet(_uri(path))
        schema = expression.schema().to_pyarrow()
        for part in sorted(path.glob("part-*.parquet")):
            with pq.ParquetFile(part) as file:
                for batch in file.iter_batches(ROWS_PER_BATCH):
                    yield pa.Table.from_batches([batch]).cast(schema).to_batches()[0]


def _uri(path: Path) -> str:
    # Not `as_uri`: Spark does not undo its escapes.
    return f"file://{path.resolve()}"


def _sql(expression: Any, dialect: str) -> str:
    import ibis

    return str(ibis.to_sql(expression, dialect=dialect))


def _unbound(name: str, schema: pa.Schema) -> Any:
    import ibis

    return ibis.table(ibis.Schema.from_pyarrow(schema), name=name)


def _renamed(name: str, expression: Any) -> Any:
    import ibis

    return ibis.table(expression.schema(), name=name)


def write_parquet(path: Path, columns: Mapping[str, Any]) -> None:
    """A small table for `Engine.add_parquet`."""
    pq.write_table(pa.table(dict(columns)), path)
