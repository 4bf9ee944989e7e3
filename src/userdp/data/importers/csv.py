"""CSV and TSV with a header line, plain or gzipped.

As with JSON Lines, DuckDB reads in columns, and a careful reader judges whatever looks odd. A row
with more or fewer fields than the header is skipped and counted. A quote that is not closed ends
the import: nobody can tell whose rows lie behind it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from userdp.data.identity import as_is
from userdp.data.importers import columnar
from userdp.data.importers.bounded import MAX_LINE_BYTES, check_compressed, lines
from userdp.data.importers.columns import (
    Columns,
    is_template,
    item_of,
    names_in,
    parts_of,
)
from userdp.data.record import BAD_LINE, ImportBatch, Record, Skipped, batches_of
from userdp.errors import InputError


def batches(path: Path, columns: Columns, scratch: Path) -> Iterator[ImportBatch]:
    """The records of a file, in order. A broken row is skipped and counted."""
    check_compressed(path)
    header = _header(path)
    if header is None:
        return
    chosen = _checked(columns.resolved(header, f"{path.name}, line 1"), header, path)
    if chosen.time is not None:
        yield from batches_of(records(path, chosen))
        return
    query = _query(path, header, chosen)
    fast = columnar.batches(query, path, scratch, partial(_place, chosen))
    yield from columnar.or_careful(fast, partial(records, path, chosen))


def _header(path: Path) -> list[str] | None:
    first = next(_rows(path), None)
    if first is None:
        return None
    number, row = first
    if row is None:
        raise InputError(f"{path.name}, line {number}: the header has a NUL byte or is not UTF-8.")
    return row


def _checked(columns: Columns, header: list[str], path: Path) -> Columns:
    if len(set(header)) < len(header):
        raise InputError(f"{path.name}, line 1: two columns have the same name.")
    for choice in (columns.user, columns.text, columns.time):
        for name in names_in(choice) if choice else ():
            if name not in header:
                raise InputError(f"{path.name}, line 1: there is no column {name!r}.")
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
        user=_concatenated(user, "nullif(trim({}), '')"),
        text=_concatenated(text, "coalesce({}, '')"),
        is_plain="true",
        decode_id=as_is,
        mean_bytes=columnar.mean_line_bytes(path),
    )


def _concatenated(choice: str, cell: str) -> str:
    if not is_template(choice):
        # An id keeps its own spelling. It is trimmed only to see whether it is blank.
        name = columnar.name(choice)
        return f"CASE WHEN {cell.format(name)} IS NOT NULL THEN coalesce({name}, '') END"
    return " || ".join(
        cell.format(columnar.name(piece)) if is_column else columnar.quoted(piece)
        for is_column, piece in parts_of(choice)
    )


def _delimiter(path: Path) -> str:
    return "\t" if ".tsv" in path.suffixes else ","


def _place(columns: Columns, path: Path, index: int) -> str:
    return columnar.place_of(records(path, columns), path, index)


def records(path: Path, columns: Columns) -> Iterator[Record | Skipped]:
    """The rows of a file one by one, by the careful reader."""
    header = _header(path)
    if header is None:
        return
    columns = _checked(columns.resolved(header, f"{path.name}, line 1"), header, path)
    user, _ = columns.named()
    for number, row in islice(_rows(path), 1, None):
        if row is None or len(row) != len(header):
            yield Skipped(BAD_LINE)
            continue
        fields = dict(zip(header, row, strict=True))
        fields_for_id = None
        if is_template(user):
            fields_for_id = {name: value.strip() for name, value in fields.items()}
        yield item_of(fields, columns, f"{path.name}, line {number}", fields_for_id=fields_for_id)


def _rows(path: Path) -> Iterator[tuple[int, list[str] | None]]:
    """Rows with the line they begin on, None where one is not text. Empty lines are not rows."""
    position = [0]
    broken = [False]

    def decoded() -> Iterator[str]:
        for number, line in lines(path):
            position[0] = number
            text = line.decode("utf-8-sig" if number == 1 else "utf-8", errors="surrogateescape")
            broken[0] |= "\x00" in text or _is_escaped(text)
            # The row is still parsed, so that the next one is found.
            yield text.replace("\x00", "")

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
            yield begin, None if broken[0] else row
        begin = position[0] + 1
        broken[0] = False


def _is_escaped(text: str) -> bool:
    """Whether some bytes of the line were no UTF-8."""
    return not text.isascii() and any("\udc80" <= char <= "\udcff" for char in text)
