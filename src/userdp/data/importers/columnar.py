"""Reading rows in columns with DuckDB: what JSON Lines and CSV share.

A `Query` says in SQL how to get the owner cells and the text out of a source. Anything unexpected
in the result raises `Doubt`. Then the format's careful reader takes over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from userdp.data.engine import duckdb_connection, file_name, quoted
from userdp.data.importers.bounded import open_bytes
from userdp.data.importers.columns import is_template, names_in, parts_of
from userdp.data.record import ImportBatch, Record, batches_of

__all__ = ["Doubt", "Query", "batches", "file_name", "quoted"]

BATCH_BYTES = 64 * 2**20
MIN_BATCH_ROWS, MAX_BATCH_ROWS = 2048, 2**20
SAMPLE_BYTES = 2**20


class Doubt(Exception):
    """The fast reader met something that the careful reader must judge."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """SQL for a source: its table function, and one expression each for owners and text.

    `is_plain` says whether the two expressions fit a row.
    """

    source: str
    user: str
    text: str
    is_plain: str
    decode_id: Callable[[str], str]
    mean_bytes: float


def name(column: str) -> str:
    """A column's name as SQL."""
    return '"' + column.replace('"', '""') + '"'


def struct(types: Mapping[str, str]) -> str:
    """Column types as DuckDB's readers take them."""
    return "{" + ", ".join(f"{quoted(key)}: {quoted(kind)}" for key, kind in types.items()) + "}"


def json_user(choice: str, *, several: bool) -> str:
    """SQL for the owner cells: JSON of one id, a list of such, or of the cells of a template."""
    if is_template(choice):
        return json_cells([f"{name(column)}::VARCHAR" for column in names_in(choice)])
    return name(choice) + ("::VARCHAR[]" if several else "::VARCHAR")


def json_cells(cells: Sequence[str]) -> str:
    """SQL for a JSON list of cells, each given as SQL for its JSON; `FromCells` reads it."""
    return "'[' || " + " || ',' || ".join(cells) + " || ']'"


def json_text(choice: str) -> str:
    """SQL for the text: a JSON string without its quotes, or a template of such strings."""
    if is_template(choice):
        return " || ".join(
            f"coalesce({name(piece)} ->> '$', '')" if is_column else quoted(piece)
            for is_column, piece in parts_of(choice)
        )
    return f"{name(choice)} ->> '$'"


def mean_line_bytes(path: Path) -> float:
    """The mean length of a line, estimated from the beginning of the file."""
    with open_bytes(path) as file:
        sample = file.read(SAMPLE_BYTES)
    return len(sample) / max(1, sample.count(b"\n"))


def batches(
    query: Query, path: Path, scratch: Path, place: Callable[[Path, int], str]
) -> Iterator[ImportBatch]:
    """The source's batches in order; `place(path, i)` names the place of record i."""
    import duckdb

    rows = int(np.clip(BATCH_BYTES / max(1.0, query.mean_bytes), MIN_BATCH_ROWS, MAX_BATCH_ROWS))
    connection = duckdb_connection(scratch)
    start = 0
    try:
        connection.execute("SET arrow_large_buffer_size = true")
        relation = connection.sql(
            f"SELECT {query.user} AS users, {query.text} AS text, "
            f"{query.is_plain} AS is_plain FROM {query.source}"
        )
        for piece in relation.to_arrow_reader(rows):
            yield _batch(piece, query, partial(_where, path, place, start))
            start += piece.num_rows
    except (duckdb.Error, pa.ArrowException, OSError, UnicodeError):
        # DuckDB's messages quote the data, so they are dropped. The careful reader has its own.
        # Where the quote is cut inside a character, the message itself cannot be decoded.
        raise Doubt from None
    finally:
        connection.close()


def or_careful(
    fast: Iterator[ImportBatch], careful: Callable[[], Iterator[Record]]
) -> Iterator[ImportBatch]:
    """The batches of the fast reader. After a doubt, the careful reader continues."""
    done = 0
    try:
        for batch in fast:
            done += len(batch)
            yield batch
    except Doubt:
        records = careful()
        for _ in range(done):
            next(records)
        yield from batches_of(records)


def place_of(records: Iterator[Record], path: Path, index: int) -> str:
    """Where record `index` is. If the careful reader objects to the file, its error comes first."""
    where = path.name
    for i, record in enumerate(records):
        if i == index:
            where = record.where
    return where


def _where(path: Path, place: Callable[[Path, int], str], start: int, row: int) -> str:
    return place(path, start + row)


def _batch(
    piece: pa.RecordBatch,
    query: Query,
    where: Callable[[int], str],
) -> ImportBatch:
    cells, texts, is_plain = piece.columns
    if cells.null_count or texts.null_count or is_plain.null_count or is_plain.false_count:
        raise Doubt
    if has_nul(texts):
        raise Doubt
    counts: NDArray[np.int64]
    if pa.types.is_list(cells.type) or pa.types.is_large_list(cells.type):
        counts = np.diff(cells.offsets.to_numpy()).astype(np.int64)
        cells = cells.flatten()
        if cells.null_count or not counts.all():
            raise Doubt
    else:
        counts = np.ones(len(cells), np.int64)
    return ImportBatch(
        texts=texts.cast(pa.large_string()),
        owners=cells,
        owner_counts=counts,
        where=where,
        decode=query.decode_id,
    )


def has_nul(texts: Any) -> bool:
    """Whether a NUL byte is in any of the strings."""
    data = texts.buffers()[2]
    if data is None or not len(texts):
        return False
    offsets = np.frombuffer(texts.buffers()[1], np.int64)[texts.offset :][: len(texts) + 1]
    view = np.frombuffer(data, np.uint8)[int(offsets[0]) : int(offsets[-1])]
    return bool(len(view)) and int(view.min()) == 0
