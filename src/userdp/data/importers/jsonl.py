"""JSON Lines, plain or gzipped: one object per line, with a field for owners and one for text.

There are two readers. DuckDB reads in columns, on all cores. If it refuses something, or if its
result looks odd, the careful reader goes on, one line at a time. It either finds nothing wrong or
names the wrong line. So only the careful reader ever refuses a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

from userdp.data.importers import columnar
from userdp.data.importers.bounded import MAX_LINE_BYTES, check_compressed, lines
from userdp.data.importers.columns import (
    Columns,
    FromCells,
    checked,
    id_of,
    is_blank,
    is_template,
    names_in,
    owners_of,
    seconds_of,
    text_of,
)
from userdp.data.record import ImportBatch, Record, batches_of
from userdp.errors import InputError


def batches(path: Path, columns: Columns, scratch: Path) -> Iterator[ImportBatch]:
    """The records of a file, in order. A broken line ends the import, and the error names it."""
    first = next(_objects(path), None)
    if first is None:
        return
    number, fields = first
    chosen = columns.resolved(list(fields), f"{path.name}, line {number}")
    user, text = chosen.named()
    chat = isinstance(fields.get(text), list)
    if chat or chosen.time is not None:
        yield from batches_of(records(path, chosen, chat=chat), is_chat=chat)
        return
    check_compressed(path)
    query = _query(path, chosen, several=isinstance(fields.get(user), list))
    fast = columnar.batches(query, path, scratch, partial(_place, chosen))
    yield from columnar.or_careful(fast, partial(records, path, chosen))


def _query(path: Path, columns: Columns, *, several: bool) -> columnar.Query:
    user, text = columns.named()
    types = dict.fromkeys([*names_in(user), *names_in(text)], "JSON")
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
            ]
        ),
        decode_id=FromCells(user) if is_template(user) else _decode_id,
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


def records(path: Path, columns: Columns | None = None, *, chat: bool = False) -> Iterator[Record]:
    """The records of a file one by one, by the careful reader.

    Lines without an owner are counted to the end and then refused together. Their number tells the
    caller whether the column is wrong or only a few lines are.
    """
    ownerless: list[str] = []
    chosen = columns or Columns()
    for number, fields in _objects(path):
        where = f"{path.name}, line {number}"
        if chosen.user is None or chosen.text is None:
            chosen = chosen.resolved(list(fields), where)
        user, text = chosen.named()
        owners = owners_of(fields, user, where)
        if not owners:
            ownerless.append(where)
            continue
        yield Record(
            text=text_of(fields, text, where, chat=chat),
            owners=owners,
            where=where,
            time=seconds_of(fields.get(chosen.time), chosen.time, where) if chosen.time else None,
        )
    if ownerless:
        raise InputError(
            f"{ownerless[0]}: field {chosen.user!r} is missing, null or empty, as in "
            f"{len(ownerless):,} line(s) of this file. Every record needs a user: mend them, or "
            "name the right column with --user."
        )


def _content_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    for number, line in lines(path):
        if not line.isspace():
            yield number, line


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in _content_lines(path):
        yield number, _parse(line, f"{path.name}, line {number}")


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
    for number, fields in _objects(path):
        yield text_of(fields, column, f"{path.name}, line {number}")
