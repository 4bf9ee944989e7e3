"""CSV and TSV with a header line, plain or gzipped.

As with JSON Lines, DuckDB reads in columns, and a careful reader judges whatever looks odd. A line
with more or fewer fields than the header is an error, which names the line.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from userdp.data.identity import trimmed
from userdp.data.importers import columnar
from userdp.data.importers.bounded import MAX_LINE_BYTES, check_compressed, lines
from userdp.data.importers.columns import (
    Columns,
    FromCells,
    content_of,
    is_template,
    names_in,
    no_column,
    owners_of,
    parts_of,
    seconds_of,
)
from userdp.data.record import ImportBatch, Record, batches_of
from userdp.errors import InputError

OTHER_DELIMITERS = {";": "semicolon", "\t": "tab", "|": "bar", ",": "comma"}

# What programs write where an id is missing. Read as an id, it would be a user of many people.
NOBODY = frozenset({"nan", "NaN", "NAN", "<NA>", "null", "NULL", "None"})
# A whole number that went through a program for decimal ones: 1 and 1.0 may be one person.
DECIMAL = re.compile(r"[+-]?[0-9]*\.[0-9]*(?:[eE][+-]?[0-9]+)?|[+-]?inf(?:inity)?", re.IGNORECASE)


def batches(path: Path, columns: Columns, scratch: Path) -> Iterator[ImportBatch]:
    """The records of a file, in order. A broken line ends the import, and the error names it."""
    check_compressed(path)
    first = next(_rows(path), None)
    if first is None:
        return
    header = first[1]
    _refuse_other_delimiter(header, path)
    chosen = _checked(columns.resolved(header, f"{path.name}, line 1"), header, path)
    if chosen.time is not None or chosen.text_kind != "plain":
        yield from batches_of(records(path, chosen), text_kind=chosen.text_kind)
        return
    query = _query(path, header, chosen)
    fast = columnar.batches(query, path, scratch, partial(_place, chosen))
    yield from columnar.or_careful(fast, partial(records, path, chosen))


def _refuse_other_delimiter(header: list[str], path: Path) -> None:
    """Refuse a header of one cell that another delimiter would cut into several."""
    if len(header) > 1:
        return
    for delimiter, name in OTHER_DELIMITERS.items():
        if delimiter != _delimiter(path) and delimiter in header[0]:
            raise InputError(
                f"{path.name}, line 1: one column only, with a {name} in its name: is that what "
                "separates the columns? Save the file with commas, or with tabs as .tsv."
            )


def _checked(columns: Columns, header: list[str], path: Path) -> Columns:
    if len(set(header)) < len(header):
        raise InputError(f"{path.name}, line 1: two columns have the same name.")
    for choice in columns.chosen:
        for name in names_in(choice):
            if name not in header:
                raise no_column(name, header, f"{path.name}, line 1")
    return columns


def _query(path: Path, header: list[str], columns: Columns) -> columnar.Query:
    user, text = columns.named()
    types = columnar.struct(dict.fromkeys(header, "VARCHAR"))
    return columnar.Query(
        source=(
            f"read_csv({columnar.file_name(path)}, auto_detect = false, header = true, "
            f"columns = {types}, delim = {columnar.quoted(_delimiter(path))}, quote = '\"', "
            f"escape = '\"', strict_mode = true, null_padding = false, ignore_errors = false, "
            f"max_line_size = {MAX_LINE_BYTES})"
        ),
        user=_cells(user) if is_template(user) else columnar.name(user),
        text=_text(text),
        is_plain="true",
        decode_id=_FromCells(user) if is_template(user) else _plain_id,
        mean_bytes=columnar.mean_line_bytes(path),
    )


def _cells(template: str) -> str:
    return columnar.json_cells(
        [f"to_json({columnar.name(column)})::VARCHAR" for column in names_in(template)]
    )


def _text(choice: str) -> str:
    parts = parts_of(choice) if is_template(choice) else [(True, choice)]
    return " || ".join(
        f"coalesce({columnar.name(piece)}, '')" if is_column else columnar.quoted(piece)
        for is_column, piece in parts
    )


def _delimiter(path: Path) -> str:
    return "\t" if ".tsv" in path.suffixes else ","


def _place(columns: Columns, path: Path, index: int) -> str:
    return columnar.place_of(records(path, columns), path, index)


def records(path: Path, columns: Columns) -> Iterator[Record]:
    """The records of a file one by one, by the careful reader."""
    ownerless: list[str] = []
    header: list[str] | None = None
    for number, row in _rows(path):
        where = f"{path.name}, line {number}"
        if header is None:
            header = row
            columns = _checked(columns.resolved(header, where), header, path)
            continue
        if len(row) != len(header):
            raise InputError(
                f"{where}: {len(row)} fields, but the header has {len(header)} columns."
            )
        user, _ = columns.named()
        fields = dict(zip(header, row, strict=True))
        owners = _owners_of(fields, user, where)
        if not owners:
            ownerless.append(where)
            continue
        yield Record(
            text=content_of(fields, columns, where),
            owners=owners,
            where=where,
            time=seconds_of(fields[columns.time], columns.time, where) if columns.time else None,
        )
    if ownerless:
        raise InputError(
            f"{ownerless[0]}: column {columns.user!r} is empty, as in {len(ownerless):,} line(s) "
            "of this file (words for nothing, such as nan, count as empty). Every record needs a "
            "user: mend them, or name the right column with --user."
        )


def _owners_of(fields: dict[str, str], choice: str, where: str) -> tuple[str, ...]:
    """The owner, or none if a cell of the id is missing. A decimal number is refused."""
    cells = {name: trimmed(fields[name]) for name in names_in(choice)}
    if NOBODY.intersection(cells.values()):
        return ()
    for name, cell in cells.items():
        if _is_decimal(cell):
            raise InputError(
                f"{where}: column {name!r} must hold user ids as words or whole numbers, not a "
                "decimal number: 1.0 may not mean user 1. Write the column as whole numbers."
            )
    return owners_of(fields, choice, where)


def _plain_id(cell: str) -> str:
    """The id in a cell, as `_owners_of` finds it. ValueError if it is missing or decimal."""
    seen = trimmed(cell)
    if not seen or seen in NOBODY or _is_decimal(seen):
        raise ValueError("missing or decimal")
    return cell


def _is_decimal(cell: str) -> bool:
    # Few ids have a point or the word inf in them, so most need no closer look.
    if "." not in cell and "inf" not in cell.lower():
        return False
    return DECIMAL.fullmatch(cell) is not None and any(sign.isalnum() for sign in cell)


class _FromCells(FromCells):
    """`FromCells` with the rules for the cells of a CSV."""

    def owners(self, fields: dict[str, Any]) -> tuple[str, ...]:
        """The owner, or none if a cell is missing."""
        if any(value is None for value in fields.values()):
            return ()
        return _owners_of(fields, self.template, "")


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Rows with the line they begin on. Empty lines are not rows."""
    position = [0]

    def decoded() -> Iterator[str]:
        for number, line in lines(path):
            position[0] = number
            if b"\x00" in line:
                raise InputError(f"{path.name}, line {number}: contains a NUL byte.")
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise InputError(f"{path.name}, line {number}: not valid UTF-8.") from None

    csv.field_size_limit(MAX_LINE_BYTES)
    reader = csv.reader(decoded(), delimiter=_delimiter(path), strict=True)
    begin = 1
    while True:
        try:
            row = next(reader, None)
        except csv.Error:
            raise InputError(
                f"{path.name}, line {begin}: not valid CSV: a quote is not closed, or stands "
                "inside a field without being doubled."
            ) from None
        if row is None:
            return
        if row:
            yield begin, row
        begin = position[0] + 1
