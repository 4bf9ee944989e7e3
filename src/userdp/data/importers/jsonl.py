"""JSON Lines, plain or gzipped: one object per line, with a field for owners and one for text.

There are two readers. DuckDB reads in columns, on all cores. If it refuses something, or if its
result looks odd, the careful reader goes on, one line at a time. It skips and counts what is no
record. Only the careful reader ever refuses a file, and then for something that concerns all of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from userdp.data.identity import as_is
from userdp.data.importers import columnar
from userdp.data.importers.bounded import MAX_LINE_BYTES, check_compressed, lines
from userdp.data.importers.columns import (
    CHAT_COLUMNS,
    TEXT_COLUMNS,
    USER_COLUMNS,
    Columns,
    checked,
    id_of,
    is_blank,
    is_template,
    item_of,
    names_in,
    text_of,
)
from userdp.data.record import BAD_LINE, ImportBatch, Record, Skipped, batches_of
from userdp.errors import InputError


def batches(path: Path, columns: Columns, scratch: Path) -> Iterator[ImportBatch]:
    """The records of a file, in order. A broken line is skipped and counted."""
    chosen, values = _resolved(path, columns)
    user, text = chosen.named()
    chat = _is_chat(text, values.get(text))
    if chat or chosen.time is not None:
        yield from batches_of(records(path, chosen, chat=chat), is_chat=chat)
        return
    check_compressed(path)
    query = _query(path, chosen, several=isinstance(values.get(user), list))
    fast = columnar.batches(query, path, scratch, partial(_place, chosen))
    yield from columnar.or_careful(fast, partial(records, path, chosen))


def _resolved(path: Path, columns: Columns) -> tuple[Columns, dict[str, Any]]:
    """The columns, chosen from as many lines as it takes to find each, and their first values.

    The lines after these are held to the same choice: a record with a rival column is refused. So
    it makes no difference which line comes first.
    """
    wanted = [
        names_in(columns.user) if columns.user else USER_COLUMNS,
        names_in(columns.text) if columns.text else TEXT_COLUMNS,
    ]
    values: dict[str, Any] = {}
    any_object = False
    for _, fields in _objects(path):
        if fields is None:
            continue
        any_object = True
        for name in (name for names in wanted for name in names):
            if fields.get(name) is not None:
                values.setdefault(name, fields[name])
        if all(any(name in values for name in names) for names in wanted):
            break
    if not any_object:
        # Nothing will be found; the reader counts the broken lines.
        columns = replace(
            columns,
            user=columns.user or USER_COLUMNS[0],
            text=columns.text or TEXT_COLUMNS[0],
        )
    return columns.resolved(list(values), path.name), values


def _is_chat(text: str, value: Any) -> bool:
    """Whether the texts are chats. Well-known names say so themselves, whatever a record holds."""
    if text in TEXT_COLUMNS or is_template(text):
        return text in CHAT_COLUMNS
    return isinstance(value, list)


def _query(path: Path, columns: Columns, *, several: bool) -> columnar.Query:
    user, text = columns.named()
    types = dict.fromkeys([*names_in(user), *names_in(text), *columns.rivals], "JSON")
    if several and not is_template(user):
        types[user] = "JSON[]"
    # DuckDB reads lines of up to twice this size, so no line above our limit passes.
    return columnar.Query(
        source=(
            f"read_json({columnar.file_name(path)}, format = 'newline_delimited', columns = "
            f"{columnar.struct(types)}, maximum_object_size = {MAX_LINE_BYTES // 2})"
        ),
        user=columnar.json_user(user, several=several),
        text=columnar.json_text(text),
        is_plain=" AND ".join(
            [
                "true" if is_template(text) else f"starts_with({columnar.name(text)}, '\"')",
                "true"
                if several or is_template(user)
                else f"NOT starts_with({columnar.name(user)}, '[')",
                *(f"{columnar.name(rival)} IS NULL" for rival in columns.rivals),
            ]
        ),
        decode_id=as_is if is_template(user) else _decode_id,
        mean_bytes=columnar.mean_line_bytes(path),
    )


def _decode_id(cell: str) -> str:
    """An id from its JSON spelling. ValueError if it is blank, or no string or whole number."""
    value = json.loads(cell)
    if is_blank(value):
        raise ValueError("blank")
    return checked(id_of(value, "", ""), "", "")


def _place(columns: Columns, path: Path, index: int) -> str:
    return columnar.place_of(records(path, columns), path, index)


def records(
    path: Path, columns: Columns | None = None, *, chat: bool = False
) -> Iterator[Record | Skipped]:
    """The lines of a file by the careful reader: one item for each that is not empty."""
    chosen = columns or Columns()
    if chosen.user is None or chosen.text is None:
        chosen, _ = _resolved(path, chosen)
    for number, fields in _objects(path):
        where = f"{path.name}, line {number}"
        yield Skipped(BAD_LINE) if fields is None else _item(fields, chosen, where, chat=chat)


def _item(fields: dict[str, Any], columns: Columns, where: str, *, chat: bool) -> Record | Skipped:
    columns.check_rivals(fields, where)
    _, text = columns.named()
    if text not in TEXT_COLUMNS and isinstance(fields.get(text), str if chat else list):
        raise InputError(
            f"{where}: field {text!r} holds chat messages in some lines and plain text in others: "
            "import them apart."
        )
    return item_of(fields, columns, where, chat=chat)


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """The object on every line that is not empty, or None if there is none."""
    for number, line in lines(path):
        if not line.isspace():
            try:
                yield number, _parse(line, f"{path.name}, line {number}")
            except InputError:
                yield number, None


def _parse(line: bytes, where: str) -> dict[str, Any]:
    if b"\x00" in line:
        raise InputError(f"{where}: contains a NUL byte.")
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise InputError(f"{where}: not valid UTF-8.") from None
    except (ValueError, RecursionError):
        # ValueError: bad JSON, or an integer of more digits than Python converts.
        raise InputError(f"{where}: not valid JSON.") from None
    if not isinstance(fields, dict):
        raise InputError(f"{where}: not a JSON object.")
    return cast(dict[str, Any], fields)


def texts(path: Path, column: str) -> Iterator[str]:
    """The texts of a public corpus, which needs no owners."""
    for number, line in lines(path):
        if not line.isspace():
            where = f"{path.name}, line {number}"
            yield text_of(_parse(line, where), column, where)
