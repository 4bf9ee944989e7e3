"""The engine that groups, joins and counts: DuckDB in this process, or a Spark cluster.

Imports, the search for near-duplicates and bounding in rounds are written once, as Ibis expressions
over named tables. An engine translates them to its own SQL and returns the rows as Arrow. Tables
may be larger than the memory: DuckDB writes to disk beyond its memory limit. Both engines return
the same rows. Where the order matters, the expression sorts by a key without ties. All columns are
whole numbers.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from userdp.errors import InputError

MEMORY_LIMIT = "1500MB"
ROWS_PER_BATCH = 2**20

# DuckDB writes its memory limit as a number and one of these.
_UNITS = {"bytes": 1} | {f"{prefix}iB": 1 << 10 * (i + 1) for i, prefix in enumerate("KMGTP")}

# The largest state of a group in any query of bounding: a flag, a count and a bit set, rounded up.
_COUNTER_BYTES = 32


class EngineName(StrEnum):
    """Which engine to use."""

    DUCKDB = "duckdb"
    SPARK = "spark"


class Engine(Protocol):
    """Named tables, and Ibis expressions over them."""

    @property
    def join_range(self) -> int | None:
        """The range of keys that the engine joins fastest; None if it makes no difference."""
        ...

    def add_parquet(self, name: str, path: Path) -> Any:
        """Return a Parquet file as a table."""
        ...

    def load(self, name: str, rows: pa.Table) -> Any:
        """Return a table with these rows."""
        ...

    def hold(self, name: str, expression: Any, *, filter_last: bool = False) -> Any:
        """Compute the expression now and return its rows as a table.

        With `filter_last`, an engine that would filter while it joins must join first.
        """
        ...

    def drop(self, *names: str) -> None:
        """Forget tables made by `load` or `hold`."""
        ...

    def count(self, table: Any) -> int:
        """Return the number of rows of a table."""
        ...

    def batches(self, expression: Any) -> Iterator[pa.RecordBatch]:
        """Yield the expression's rows, in its order."""
        ...

    def fetch(self, expression: Any) -> pa.Table:
        """Return all rows of an expression that fits into memory, in its order."""
        ...

    def held_bytes(self) -> int:
        """Return the bytes that the tables take now, in memory and on disk together."""
        ...


@contextmanager
def engine_of(
    name: EngineName,
    scratch: Path,
    *,
    memory_limit: str = MEMORY_LIMIT,
    count_by_place: bool = False,
) -> Generator[Engine]:
    """Open an engine that keeps what does not fit into memory in `scratch`.

    The last two arguments are for DuckDB; Spark has its own settings. See `count_in_arrays` for
    `count_by_place`.
    """
    if name is EngineName.DUCKDB:
        engine = DuckDB(scratch, memory_limit=memory_limit)
        if count_by_place:
            engine.count_in_arrays()
    else:
        engine = Spark(scratch)
    try:
        yield engine
    finally:
        engine.close()


def duckdb_connection(scratch: Path, *, memory_limit: str = MEMORY_LIMIT) -> Any:
    """Open a DuckDB in memory that spills into `scratch` and never fetches extensions."""
    import duckdb

    settings: dict[str, Any] = {"memory_limit": memory_limit, "temp_directory": str(scratch)}
    try:
        connection = duckdb.connect(":memory:", config=settings)
    except duckdb.Error as error:
        raise InputError(
            f"DuckDB does not start with memory_limit={memory_limit!r}: give a size such as 4GB."
        ) from error
    connection.execute("SET autoinstall_known_extensions = false")
    # A progress bar would appear on stdout, where only results belong.
    connection.execute("SET enable_progress_bar = false")
    connection.execute(f"SET threads = {len(os.sched_getaffinity(0))}")
    return connection


def quoted(value: str) -> str:
    """Return a string as an SQL literal.

    >>> quoted("it's")
    "'it''s'"
    """
    return "'" + value.replace("'", "''") + "'"


def file_name(path: Path) -> str:
    """Return a path as an SQL literal that DuckDB's readers do not take for a pattern.

    >>> file_name(Path("a[1]*.parquet"))
    "'a[[]1][*].parquet'"
    """
    return quoted(re.sub(r"([*?\[])", r"[\1]", str(path)))


class DuckDB:
    """DuckDB in this process."""

    # DuckDB looks up keys within a million in an array. Half of that stays in the cache.
    join_range: int | None = 1 << 19

    def __init__(self, scratch: Path, *, memory_limit: str = MEMORY_LIMIT) -> None:
        self._connection = duckdb_connection(scratch, memory_limit=memory_limit)

    def close(self) -> None:
        """Free memory and temporary files."""
        self._connection.close()

    def run(self, sql: str) -> list[tuple[Any, ...]]:
        """Run a statement to its end and return its rows."""
        return self._connection.execute(sql).fetchall()

    def count_in_arrays(self) -> None:
        """Make DuckDB count by consecutive numbers in an array, not in a hash table.

        The array is never written to disk, so the arrays of all threads together may take a quarter
        of the memory.
        """
        query = "SELECT current_setting('memory_limit'), current_setting('threads')"
        ((limit, threads),) = self.run(query)
        number, unit = str(limit).split()
        counters = float(number) * _UNITS[unit] / (4 * _COUNTER_BYTES * int(threads))
        bits = min(30, max(12, int(math.log2(counters))))
        self.run(f"SET perfect_ht_threshold = {bits}")

    def add_parquet(self, name: str, path: Path) -> Any:
        """Return a Parquet file as a table."""
        self.run(f"CREATE VIEW {name} AS SELECT * FROM read_parquet({file_name(path)})")
        return _table(name, pq.read_schema(path))

    def load(self, name: str, rows: pa.Table) -> Any:
        """Return a table with these rows."""
        # A copy: DuckDB knows the range of a column only for tables of its own, and needs it to
        # count and join in arrays.
        self._connection.register("userdp_arrow", rows)
        self.run(f"CREATE TABLE {name} AS SELECT * FROM userdp_arrow")
        self._connection.unregister("userdp_arrow")
        return _table(name, rows.schema)

    def hold(self, name: str, expression: Any, *, filter_last: bool = False) -> Any:
        """Compute the expression now and return its rows as a table."""
        # DuckDB would make a filter over columns of both sides part of the join. It would then look
        # keys up in a hash table instead of an array, which takes twice as long.
        if filter_last:
            self.run("SET disabled_optimizers = 'filter_pushdown'")
        self.run(f"CREATE TABLE {name} AS {_sql(expression.op(), 'duckdb')}")
        if filter_last:
            self.run("RESET disabled_optimizers")
        return _renamed(name, expression)

    def drop(self, *names: str) -> None:
        """Forget tables made by `load` or `hold`."""
        for name in names:
            self.run(f"DROP TABLE {name}")

    def count(self, table: Any) -> int:
        """Return the number of rows of a table."""
        return int(self.run(f"SELECT count(*) FROM {table.get_name()}")[0][0])

    def batches(self, expression: Any) -> Iterator[pa.RecordBatch]:
        """Yield the expression's rows, in its order."""
        relation = self._connection.sql(_sql(expression.op(), "duckdb"))
        yield from relation.to_arrow_reader(ROWS_PER_BATCH)

    def fetch(self, expression: Any) -> pa.Table:
        """Return all rows of an expression that fits into memory, in its order."""
        return self._connection.sql(_sql(expression.op(), "duckdb")).to_arrow_table()

    def held_bytes(self) -> int:
        """Return the bytes that the tables take now, in memory and on disk together."""
        query = "SELECT sum(memory_usage_bytes + temporary_storage_bytes) FROM duckdb_memory()"
        return int(self.run(query)[0][0])


class Spark:
    """The Spark session that is running, or a local one. All tables are Parquet files."""

    # Spark splits joins by itself.
    join_range: int | None = None

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
        self._views: set[str] = set()
        self._written: dict[str, Path] = {}
        self._num_paths = 0

    def close(self) -> None:
        """Drop our views, and stop the session if we started it."""
        for name in self._views:
            self._session.catalog.dropTempView(name)
        if self._owned:
            self._session.stop()

    def add_parquet(self, name: str, path: Path) -> Any:
        """Return a Parquet file as a table."""
        self._view(name, path)
        return _table(name, pq.read_schema(path))

    def load(self, name: str, rows: pa.Table) -> Any:
        """Return a table with these rows."""
        path = self._written[name] = self._new_path(name)
        pq.write_table(rows, path, compression="none", use_dictionary=False)
        return self.add_parquet(name, path)

    def hold(self, name: str, expression: Any, *, filter_last: bool = False) -> Any:
        """Compute the expression now and return its rows as a table."""
        path = self._written[name] = self._write(name, expression)
        self._view(name, path)
        return _renamed(name, expression)

    def drop(self, *names: str) -> None:
        """Forget tables made by `load` or `hold`."""
        for name in names:
            self._session.catalog.dropTempView(name)
            self._views.discard(name)
            path = self._written.pop(name)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def count(self, table: Any) -> int:
        """Return the number of rows of a table."""
        return int(self._session.sql(f"SELECT count(*) FROM {table.get_name()}").first()[0])

    def batches(self, expression: Any) -> Iterator[pa.RecordBatch]:
        """Yield the expression's rows, in its order.

        Spark writes a sorted result as numbered part files. Each is sorted, and so are the parts.
        """
        path = self._write("result", expression)
        schema = expression.schema().to_pyarrow()
        try:
            for part in sorted(path.glob("part-*.parquet")):
                with pq.ParquetFile(part) as file:
                    for batch in file.iter_batches(ROWS_PER_BATCH):
                        yield pa.Table.from_batches([batch]).cast(schema).to_batches()[0]
        finally:
            shutil.rmtree(path)

    def fetch(self, expression: Any) -> pa.Table:
        """Return all rows of an expression that fits into memory, in its order."""
        schema = expression.schema().to_pyarrow()
        return pa.Table.from_batches(list(self.batches(expression)), schema)

    def held_bytes(self) -> int:
        """Return the bytes that the tables take now, in memory and on disk together."""
        files = (file for path in self._written.values() for file in (path, *path.rglob("*")))
        return sum(file.stat().st_size for file in files if file.is_file())

    def _new_path(self, name: str) -> Path:
        # Never one that was used before: Spark may remember which files it found there.
        self._num_paths += 1
        return self._scratch / f"{name}_{self._num_paths}.parquet"

    def _write(self, name: str, expression: Any) -> Path:
        path = self._new_path(name)
        self._session.sql(_sql(expression.op(), "pyspark")).write.parquet(_uri(path))
        return path

    def _view(self, name: str, path: Path) -> None:
        # Hadoop would read these characters as patterns.
        literal = re.sub(r"([\[\]{}*?\\])", r"\\\1", _uri(path))
        self._session.read.parquet(literal).createOrReplaceTempView(name)
        self._views.add(name)


def _uri(path: Path) -> str:
    # Not `as_uri`: Spark does not undo its escapes.
    return f"file://{path.resolve()}"


@lru_cache(maxsize=256)
def _sql(operation: Any, dialect: str) -> str:
    """Translate an expression to SQL. Cached: this takes as long as a small query."""
    import ibis

    return str(ibis.to_sql(operation.to_expr(), dialect=dialect))


def _table(name: str, schema: pa.Schema) -> Any:
    import ibis

    return ibis.table(ibis.Schema.from_pyarrow(schema), name=name)


def _renamed(name: str, expression: Any) -> Any:
    import ibis

    return ibis.table(expression.schema(), name=name)
