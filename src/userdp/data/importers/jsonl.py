"""JSON Lines, plain or gzipped: one object per line, with a field for owners and one for text.

There are two readers. DuckDB reads in columns, on all cores. If it refuses something, or if its
result looks odd, the careful reader goes on, one line at a time. It either finds nothing wrong or
names the wrong line. So only the careful reader ever refuses a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

from userdp.data.importers import columnar
from userdp.data.importers.bounded import MAX_LINE_BYTES, check_compressed, lines
from userdp.data.importers.columns import (
    PAIR_COLUMNS,
    TEXT_COLUMNS,
    USER_COLUMNS,
    Columns,
    FromCells,
    checked,
    content_of,
    id_of,
    is_blank,
    is_template,
    names_in,
    no_column,
    owners_of,
    refuse_strings,
    seconds_of,
    text_of,
)
from userdp.data.record import ImportBatch, Record, batches_of
from userdp.errors import InputError


def batches(path: Path, columns: Columns, scratch: Path) -> Iterator[ImportBatch]:
    """The records of a file, in order. A broken line ends the import, and the error names it."""
    found = _resolved(path, columns)
    if found is None:
        return
    chosen, values = found
    user, text = chosen.named()
    chat = isinstance(values.get(text), list)
    if chat or chosen.time is not None or chosen.text_kind != "plain":
        kind = "chat" if chat and chosen.text_kind == "plain" else chosen.text_kind
        yield from batches_of(records(path, chosen, chat=chat), text_kind=kind)
        return
    check_compressed(path)
    query = _query(path, chosen, several=isinstance(values.get(user), list))
    fast = columnar.batches(query, path, scratch, partial(_place, chosen))
    yield from columnar.or_careful(fast, partial(records, path, chosen))


def _resolved(path: Path, columns: Columns) -> tuple[Columns, dict[str, Any]] | None:
    """The columns, chosen from as many lines as it takes to find each, and their first values.

    The lines after these are held to the same choice: a record with a rival column is refused, and
    so is one that mixes chats with plain text. So it makes no difference which line comes first.
    None if the file has no record.
    """
    wanted = [
        names
        for names in (
            _candidates(columns.user, USER_COLUMNS),
            _candidates(columns.text, (*TEXT_COLUMNS, *PAIR_COLUMNS)),
        )
        if names
    ]
    values: dict[str, Any] = {}
    seen: dict[str, None] = {}
    first: tuple[str, dict[str, Any]] | None = None
    chosen = columns
    for number, fields in _objects(path):
        where = f"{path.name}, line {number}"
        first = first or (where, fields)
        seen.update(dict.fromkeys(fields))
        for name in chain.from_iterable(wanted):
            if fields.get(name) is not None:
                values.setdefault(name, fields[name])
        chosen = columns.resolved_if_found(values, where)
        is_resolved = chosen.user is not None and chosen.text is not None
        if is_resolved and all(any(name in values for name in names) for names in wanted):
            return chosen, values
    if first is None:
        return None
    # No record has one of the columns, or it is always null. The reader says so of the first line.
    where, fields = first
    for name in chain.from_iterable(wanted):
        if name in (columns.user, columns.text) and name not in seen:
            raise no_column(name, seen, where)
    return chosen.resolved(fields, where), values


def _candidates(choice: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    """The columns that may serve: one must exist. The parts of a template may be missing."""
    if choice is None:
        return known
    return () if is_template(choice) else (choice,)


def _query(path: Path, columns: Columns, *, several: bool) -> columnar.Query:
    user, text = columns.named()
    types = dict.fromkeys([*names_in(user), *names_in(text), *sorted(columns.rivals)], "JSON")
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
                *(f"{columnar.name(rival)} IS NULL" for rival in sorted(columns.rivals)),
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
    if chosen.user is None or chosen.text is None:
        found = _resolved(path, chosen)
        if found is None:
            return
        chosen, _ = found
    user, text = chosen.named()
    for number, fields in _objects(path):
        where = f"{path.name}, line {number}"
        chosen.check_rivals(fields, where)
        owners = owners_of(fields, user, where)
        if not owners:
            ownerless.append(where)
            continue
        _check_kind(fields.get(text), text, where, chat=chat)
        yield Record(
            text=content_of(fields, chosen, where, chat=chat),
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


def _check_kind(value: Any, name: str, where: str, *, chat: bool) -> None:
    """Refuse plain text after chats, and chats after plain text."""
    if isinstance(value, str if chat else list):
        here, before = "plain text", "a list of chat messages"
        if not chat:
            refuse_strings(cast(list[Any], value), name, where)
            here, before = before, "a string"
        raise InputError(
            f"{where}: field {name!r} is {here} here and not {before} as in the lines before. "
            "Import the two apart."
        )


def _content_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    for number, line in lines(path):
        if not line.isspace():
            yield number, line


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for place, (number, line) in enumerate(_content_lines(path)):
        # Nothing may stand before it but blanks and the mark of UTF-8.
        if place == 0 and line.lstrip(b"\xef\xbb\xbf \t").startswith(b"["):
            raise InputError(
                f"{path.name}, line {number}: a list, and JSON Lines has one object on each line. "
                f"If the whole file is one list of records, write it anew: jq -c '.[]' {path.name} "
                "> records.jsonl"
            )
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
        raise InputError(f"{where}: not valid JSON. Each line holds one whole object.") from None
    if not isinstance(fields, dict):
        raise InputError(f"{where}: not a JSON object.")
    return cast(dict[str, Any], fields)


def texts(path: Path, column: str) -> Iterator[str]:
    """The texts of a public corpus, which needs no owners."""
    for number, fields in _objects(path):
        yield text_of(fields, column, f"{path.name}, line {number}")
