"""Parquet files and Hugging Face datasets, which are read as Arrow tables.

Owner columns hold strings or whole numbers, or lists of them. Text columns hold strings, or chats
as lists of {role, content}.
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

from userdp.data.files import pc
from userdp.data.importers.columnar import has_nul
from userdp.data.importers.columns import (
    Columns,
    chat_json,
    content_of,
    is_template,
    names_in,
    no_column,
    owners_of,
    seconds_of,
)
from userdp.data.record import NO_TIME, ImportBatch, Record, batches_of
from userdp.errors import InputError

BATCH_ROWS = 16384


def parquet_batches(path: Path, columns: Columns) -> Iterator[ImportBatch]:
    """The records of a Parquet file, in order."""
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            chosen = checked_columns(columns.resolved(schema.names, path.name), schema, path.name)
            yield from arrow_batches(
                file.iter_batches(BATCH_ROWS, columns=needed(chosen)), chosen, path.name
            )
    # A damaged footer may name its columns in bytes that are no text.
    except (pa.ArrowException, OSError, UnicodeError) as error:
        if isinstance(error, FileNotFoundError):
            raise InputError(f"{path}: no such file.") from None
        raise InputError(
            f"{path.name}: truncated or not a Parquet file; nothing was imported."
        ) from None


def saved_dataset_batches(root: Path, columns: Columns) -> Iterator[ImportBatch]:
    """The records of a Hugging Face dataset saved with `save_to_disk`, all splits in order."""
    if (root / "dataset_dict.json").is_file():
        for split in _names(root / "dataset_dict.json", lambda saved: saved["splits"]):
            yield from saved_dataset_batches(_inside(root, split), columns)
        return
    if _names(root / "state.json", lambda saved: saved.get("_indices_data_files") or []):
        raise InputError(f"{root}: holds a selection; call flatten_indices() before saving it.")
    for name in _names(root / "state.json", lambda saved: _file_names(saved["_data_files"])):
        file = _inside(root, name)
        try:
            with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
                where = f"{root.name}/{file.name}"
                chosen = checked_columns(
                    columns.resolved(stream.schema.names, where), stream.schema, where
                )
                yield from arrow_batches(_sliced(stream, needed(chosen)), chosen, where)
        except (pa.ArrowException, OSError, UnicodeError):
            raise InputError(f"{root.name}/{file.name}: truncated or not Arrow data.") from None


def dataset_batches(dataset: Any, columns: Columns) -> Iterator[ImportBatch]:
    """The records of a loaded `datasets.Dataset`, in its order."""
    refuse_transform(dataset)
    chosen = columns.resolved(list(dataset.column_names), "the dataset")
    arrow = dataset.select_columns(needed(chosen)).with_format("arrow")
    tables = arrow.iter(BATCH_ROWS)
    pieces = (piece for table in tables for piece in table.combine_chunks().to_batches())
    yield from arrow_batches(pieces, chosen, "the dataset")


def refuse_transform(dataset: Any) -> None:
    """Refuse a dataset whose rows are made anew each time that they are read."""
    if (getattr(dataset, "format", None) or {}).get("type") == "custom":
        raise InputError(
            "the dataset has a transform, which is not seen where its columns are read: apply it "
            "with dataset.map first."
        )


def _names(path: Path, choose: Callable[[dict[str, Any]], list[Any]]) -> list[Any]:
    """The list of names that a saved dataset's own JSON holds."""
    try:
        found = choose(json.loads(path.read_text(encoding="utf-8")))
        if isinstance(found, list):  # pyright: ignore[reportUnnecessaryIsInstance]
            return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise InputError(f"{path}: missing, or not as `save_to_disk` writes it; nothing was imported.")


def _file_names(entries: list[dict[str, Any]]) -> list[Any]:
    return [str(entry["filename"]) for entry in entries]


def _inside(root: Path, name: str) -> Path:
    path = root / str(name)
    try:
        is_inside = path.resolve().is_relative_to(root.resolve())
    except ValueError:
        raise InputError(f"{root}: names a file that no disk can hold.") from None
    if not is_inside:
        raise InputError(f"{root}: names a file outside of itself.")
    return path


def _sliced(stream: Any, names: list[str]) -> Iterator[pa.RecordBatch]:
    for batch in stream:
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.select(names).slice(start, BATCH_ROWS)


def needed(columns: Columns) -> list[str]:
    """The names of all columns that are read."""
    return list(dict.fromkeys(name for choice in columns.chosen for name in names_in(choice)))


def checked_columns(columns: Columns, schema: pa.Schema, where: str) -> Columns:
    """The same columns, if all of them are there."""
    for name in needed(columns):
        if name not in schema.names:
            raise no_column(name, schema.names, where)
    return columns


def arrow_batches(
    pieces: Iterable[pa.RecordBatch], columns: Columns, where: str
) -> Iterator[ImportBatch]:
    """The records of Arrow batches that follow each other; `where` names their source."""
    start = 0
    for piece in pieces:
        yield from _pieces(piece, columns, partial(_row, where, start))
        start += piece.num_rows


def _row(where: str, start: int, row: int) -> str:
    return f"{where}, row {start + row + 1}"


def _pieces(piece: pa.RecordBatch, columns: Columns, where: Any) -> Iterator[ImportBatch]:
    kind = columns.text_kind
    if kind != "plain" or any(is_template(choice) for choice in columns.named()):
        yield from batches_of(_records(piece, columns, where), text_kind=kind)
    else:
        yield _batch(piece, columns, where)


def _batch(piece: pa.RecordBatch, columns: Columns, where: Any) -> ImportBatch:
    user, text = columns.named()
    texts, is_chat = _texts(piece.column(text), text, where)
    owners, counts = _owners(piece.column(user), user, where)
    times = None
    if columns.time is not None:
        cells = piece.column(columns.time).to_pylist()
        seconds = [seconds_of(cell, columns.time, where(i)) for i, cell in enumerate(cells)]
        times = np.asarray([NO_TIME if time is None else time for time in seconds], np.int64)
    return ImportBatch(
        texts=texts,
        owners=owners,
        owner_counts=counts,
        where=where,
        times=times,
        text_kind="chat" if is_chat else "plain",
    )


def _records(piece: pa.RecordBatch, columns: Columns, where: Any) -> Iterator[Record]:
    """The rows one by one, with templates filled in, and with completions and labels."""
    user, text = columns.named()
    for i, fields in enumerate(piece.to_pylist()):
        owners = owners_of(fields, user, where(i))
        if not owners:
            raise InputError(f"{where(i)}: a column of {user!r} is null or empty.")
        chat = isinstance(fields.get(text), list)
        kept = content_of(fields, columns, where(i), chat=chat)
        time = seconds_of(fields[columns.time], columns.time, where(i)) if columns.time else None
        yield Record(text=kept, owners=owners, where=where(i), time=time)


def _texts(cells: pa.Array, name: str, where: Any) -> tuple[pa.LargeStringArray, bool]:
    if cells.null_count:
        row = pc.index(pc.is_null(cells), True).as_py()
        raise InputError(
            f"{where(row)}: column {name!r} is null, as in {cells.null_count:,} row(s)."
        )
    if _is_list(cells.type):
        chats = [chat_json(chat, name, where(i)) for i, chat in enumerate(cells.to_pylist())]
        return pa.array(chats, pa.large_string()), True
    if isinstance(cells, pa.DictionaryArray):
        cells = cells.dictionary_decode()
    if not (pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type)):
        raise InputError(f"{where(0)}: column {name!r} holds {cells.type}, not strings.")
    texts = cells.cast(pa.large_string())
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        raise InputError(f"{where(0)}: column {name!r} is not valid UTF-8 in this batch.") from None
    if has_nul(texts):
        row = pc.index(pc.match_substring(texts, "\x00"), True).as_py()
        raise InputError(f"{where(row)}: column {name!r} contains a NUL byte.")
    return texts, False


def _owners(cells: pa.Array, name: str, where: Any) -> tuple[pa.Array, Any]:
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
        raise InputError(
            f"{where(int(np.argmax(bad)))}: column {name!r} is null or empty, as in {bad.sum():,} "
            "row(s) near it. Every record needs a user: mend them, or name the right column with "
            "--user (Python: user=; UserDPTrainer: user_column=)."
        )
    return ids, counts


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)
