"""Parquet files and Hugging Face datasets, which are read as Arrow tables.

Owner columns hold strings or whole numbers, or lists of them. Text columns hold strings, or chats
as lists of {role, content}. Batches are checked in columns. If a batch has a bad cell, it is read
again row by row, and the bad rows are skipped and counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from userdp.data.files import pc
from userdp.data.importers.columnar import Doubt, has_nul
from userdp.data.importers.columns import (
    Columns,
    chat_json,
    is_template,
    item_of,
    names_in,
    seconds_of,
)
from userdp.data.record import BAD_LINE, NO_TIME, ImportBatch, Record, Skipped, batches_of
from userdp.errors import InputError

BATCH_ROWS = 16384


def parquet_batches(path: Path, columns: Columns) -> Iterator[ImportBatch]:
    """The records of a Parquet file, in order."""
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            chosen = _checked(columns.resolved(schema.names, path.name), schema, path.name)
            yield from _batches(
                file.iter_batches(BATCH_ROWS, columns=_needed(chosen)), chosen, path.name
            )
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise InputError(f"{path}: no such file.") from None
        raise InputError(
            f"{path.name}: truncated or not a Parquet file; nothing was imported."
        ) from None


def saved_dataset_batches(root: Path, columns: Columns) -> Iterator[ImportBatch]:
    """The records of a Hugging Face dataset saved with `save_to_disk`, all splits in order."""
    split_list = root / "dataset_dict.json"
    if split_list.is_file():
        for split in json.loads(split_list.read_text())["splits"]:
            yield from saved_dataset_batches(_inside(root, split), columns)
        return
    state = json.loads((root / "state.json").read_text())
    if state.get("_indices_data_files"):
        raise InputError(f"{root}: holds a selection; call flatten_indices() before saving it.")
    for entry in state["_data_files"]:
        file = _inside(root, entry["filename"])
        try:
            with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
                where = f"{root.name}/{file.name}"
                chosen = _checked(
                    columns.resolved(stream.schema.names, where), stream.schema, where
                )
                yield from _batches(_sliced(stream, _needed(chosen)), chosen, where)
        except (pa.ArrowException, OSError):
            raise InputError(f"{root.name}/{file.name}: truncated or not Arrow data.") from None


def dataset_batches(dataset: Any, columns: Columns) -> Iterator[ImportBatch]:
    """The records of a loaded `datasets.Dataset`, in its order."""
    chosen = columns.resolved(list(dataset.column_names), "the dataset")
    arrow = dataset.select_columns(_needed(chosen)).with_format("arrow")
    tables = arrow.iter(BATCH_ROWS)
    pieces = (piece for table in tables for piece in table.combine_chunks().to_batches())
    yield from _batches(pieces, chosen, "the dataset")


def _inside(root: Path, name: str) -> Path:
    path = root / name
    if not path.resolve().is_relative_to(root.resolve()):
        raise InputError(f"{root}: names a file outside of itself.")
    return path


def _sliced(stream: Any, needed: list[str]) -> Iterator[pa.RecordBatch]:
    for batch in stream:
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.select(needed).slice(start, BATCH_ROWS)


def _needed(columns: Columns) -> list[str]:
    choices = [choice for choice in (columns.user, columns.text, columns.time) if choice]
    return list(dict.fromkeys(name for choice in choices for name in names_in(choice)))


def _checked(columns: Columns, schema: pa.Schema, where: str) -> Columns:
    for name in _needed(columns):
        if name not in schema.names:
            raise InputError(f"{where}: there is no column {name!r}.")
    return columns


def _batches(
    pieces: Iterable[pa.RecordBatch], columns: Columns, where: str
) -> Iterator[ImportBatch]:
    start = 0
    for piece in pieces:
        place = partial(_row, where, start)
        user, text = columns.named()
        is_chat = not is_template(text) and _is_list(piece.column(text).type)
        by_row = is_template(user) or is_template(text)
        if not by_row:
            try:
                yield _batch(piece, columns, place)
            except Doubt:
                by_row = True
        if by_row:
            yield from batches_of(_items(piece, columns, place, is_chat), is_chat=is_chat)
        start += piece.num_rows


def _row(where: str, start: int, row: int) -> str:
    return f"{where}, row {start + row + 1}"


def _batch(piece: pa.RecordBatch, columns: Columns, where: Callable[[int], str]) -> ImportBatch:
    """A batch in columns. `Doubt` if it has a bad cell, `InputError` if it has a bad column."""
    user, text = columns.named()
    texts, is_chat = _texts(piece.column(text), text, where)
    owners, counts = _owners(piece.column(user), user, where)
    times = None
    if columns.time is not None:
        cells = piece.column(columns.time).to_pylist()
        try:
            seconds = [seconds_of(cell, columns.time, "") for cell in cells]
        except InputError:
            raise Doubt from None
        times = np.asarray([NO_TIME if time is None else time for time in seconds], np.int64)
    return ImportBatch(
        texts=texts, owners=owners, owner_counts=counts, where=where, times=times, is_chat=is_chat
    )


def _items(
    piece: pa.RecordBatch, columns: Columns, where: Callable[[int], str], is_chat: bool
) -> Iterator[Record | Skipped]:
    """The rows one by one: for templates, and to find the bad ones."""
    for i in range(piece.num_rows):
        try:
            (fields,) = piece.slice(i, 1).to_pylist()
        except UnicodeDecodeError:
            yield Skipped(BAD_LINE)
        else:
            yield item_of(fields, columns, where(i), chat=is_chat)


def _texts(
    cells: pa.Array, name: str, where: Callable[[int], str]
) -> tuple[pa.LargeStringArray, bool]:
    if _is_list(cells.type):
        try:
            chats = [chat_json(chat, name, "") for chat in _without_null(cells).to_pylist()]
        except InputError:
            raise Doubt from None
        return pa.array(chats, pa.large_string()), True
    if isinstance(cells, pa.DictionaryArray):
        cells = cells.dictionary_decode()
    if not (pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type)):
        raise InputError(f"{where(0)}: column {name!r} holds {cells.type}, not strings.")
    texts = _without_null(cells).cast(pa.large_string())
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        raise Doubt from None
    if has_nul(texts):
        raise Doubt
    return texts, False


def _without_null(cells: pa.Array) -> pa.Array:
    if cells.null_count:
        raise Doubt
    return cells


def _owners(
    cells: pa.Array, name: str, where: Callable[[int], str]
) -> tuple[pa.Array, NDArray[np.int64]]:
    if _is_list(cells.type):
        counts = pc.list_value_length(cells).fill_null(0).to_numpy().astype(np.int64)
        flat = cells.flatten()
    else:
        counts = np.ones(len(cells), np.int64)
        flat = cells
    if isinstance(flat, pa.DictionaryArray):
        flat = flat.dictionary_decode()
    is_number = pa.types.is_integer(flat.type)
    if not (is_number or pa.types.is_string(flat.type) or pa.types.is_large_string(flat.type)):
        raise InputError(
            f"{where(0)}: column {name!r} must hold user ids as strings or whole numbers, not "
            f"{flat.type}."
        )
    ids = flat.cast(pa.large_string())
    blank = np.asarray(pc.equal(pc.utf8_trim_whitespace(ids), "").fill_null(True))
    bad = counts == 0
    bad[np.repeat(np.arange(len(counts)), counts)[blank]] = True
    if bad.any():
        raise Doubt
    return ids, counts


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)
