"""Data that a program has loaded already: datasets, data frames, Arrow tables and rows.

All of them become Arrow batches, which `arrow.py` reads. Neither `datasets` nor pandas is imported
here: whoever has such an object has imported its library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from typing import Any

import pyarrow as pa

from userdp.data.importers.arrow import (
    BATCH_ROWS,
    arrow_batches,
    checked_columns,
    dataset_batches,
    needed,
)
from userdp.data.importers.columns import Columns
from userdp.data.record import ImportBatch
from userdp.errors import InputError


def loaded_batches(data: Any, columns: Columns) -> Iterator[ImportBatch]:
    """The records of a dataset, a data frame, an Arrow table, or an iterable of dicts, in order."""
    kind = type(data).__module__.partition(".")[0]
    name = type(data).__name__
    if kind == "datasets" and isinstance(data, Mapping):
        raise InputError(
            f"this {name} holds several splits: choose one of {', '.join(map(repr, data))}."
        )
    if kind == "datasets" and hasattr(data, "select_columns") and hasattr(data, "with_format"):
        if hasattr(data, "__len__"):
            _check_there(columns, data.column_names, "the dataset")
            yield from dataset_batches(data, columns)
        else:
            yield from _of_rows(data, columns, "the dataset")
    elif kind == "pandas":
        chosen = columns.resolved([str(column) for column in data.columns], "the data frame")
        _check_there(chosen, list(data.columns), "the data frame")
        table = _table(lambda: pa.Table.from_pandas(data[needed(chosen)], preserve_index=False))
        yield from _of_table(table, chosen, "the data frame")
    elif isinstance(data, pa.Table):
        chosen = columns.resolved(data.column_names, "the table")
        yield from _of_table(data, checked_columns(chosen, data.schema, "the table"), "the table")
    elif isinstance(data, Iterable) and not isinstance(data, str | bytes | Mapping):
        yield from _of_rows(data, columns, "the list")
    else:
        raise InputError(
            f"a {name} cannot be imported. Give a datasets.Dataset, a pandas DataFrame, a pyarrow "
            "Table or a list of dicts; files are read by `userdp import`."
        )


def _check_there(columns: Columns, available: list[str], where: str) -> None:
    schema = pa.schema([(str(column), pa.null()) for column in available])
    checked_columns(columns, schema, where)


def _of_table(table: pa.Table, columns: Columns, where: str) -> Iterator[ImportBatch]:
    pieces = table.select(needed(columns)).combine_chunks().to_batches(BATCH_ROWS)
    yield from arrow_batches(pieces, columns, where)


def _of_rows(rows: Iterable[Any], columns: Columns, where: str) -> Iterator[ImportBatch]:
    """Rows one after the other, so that a dataset which is streamed need not fit into memory."""
    pieces = _pieces(iter(rows), where)
    first = next(pieces, [])
    available = dict.fromkeys(str(name) for row in first for name in row)
    chosen = columns.resolved(list(available), where)
    _check_there(chosen, list(available), where)
    yield from arrow_batches(_arrow(chain([first], pieces), needed(chosen)), chosen, where)


def _pieces(rows: Iterator[Any], where: str) -> Iterator[list[Mapping[str, Any]]]:
    while piece := list(islice(rows, BATCH_ROWS)):
        if not all(isinstance(row, Mapping) for row in piece):
            raise InputError(f"{where}: every row must be a dict with one entry for each column.")
        yield piece


def _arrow(pieces: Iterable[list[Mapping[str, Any]]], names: list[str]) -> Iterator[pa.RecordBatch]:
    for piece in pieces:
        # A row that lacks a column has null there, and null is refused with the row's number.
        cells = {name: [row.get(name) for row in piece] for name in names}
        yield from _table(partial(pa.table, cells)).to_batches()


def _table(make: Callable[[], pa.Table]) -> pa.Table:
    try:
        return make()
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        # What Arrow says quotes the data.
        raise InputError(
            "a column holds values of several kinds: user ids must all be strings or all be whole "
            "numbers, and texts must all be strings or all be chats."
        ) from None
