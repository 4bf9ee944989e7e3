"""JSON Lines, plain or gzipped: one object a line, a column for the owners and one for the text."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from userdp.data.record import Record
from userdp.errors import InputError

USER_COLUMNS = ("users", "user", "user_id", "author", "author_id", "owner")
TEXT_COLUMNS = ("text", "body", "content", "message")

# Above this a line is a mistake or an attack; it is refused before it fills the memory.
MAX_LINE_BYTES = 32 * 2**20
# A compressed file that grows beyond both is treated as a decompression bomb.
BOMB_BYTES = 2**30
BOMB_RATIO = 200


def records(path: Path, *, user: str | None = None, text: str | None = None) -> Iterator[Record]:
    """The records of a file, in order; any broken line ends the import with its number.

    Lines without an owner are counted to the end and then refused together: how many there are tells
    the caller whether the column is wrong or a few lines are.
    """
    ownerless: list[str] = []
    for number, line in _lines(path):
        where = f"{path.name}, line {number}"
        fields = _parse(line, where)
        user = user or _find_column(fields, USER_COLUMNS, "user", where)
        text = text or _find_column(fields, TEXT_COLUMNS, "text", where)
        owners = _owners_of(fields, user, where)
        if not owners:
            ownerless.append(where)
            continue
        yield Record(text=_text_of(fields, text, where), owners=owners, where=where)
    if ownerless:
        raise InputError(
            f"{ownerless[0]}: field {user!r} is missing, null or empty, as in {len(ownerless):,} "
            "line(s) of this file. Every record needs a user: mend them, or name the right column "
            "with --user."
        )


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered non-blank lines, each bounded in size."""
    if not path.is_file():
        raise InputError(f"{path}: no such file.")
    compressed_size = path.stat().st_size
    with path.open("rb") as probe:
        is_gzip = probe.read(2) == b"\x1f\x8b"
    number = 0
    total = 0
    with cast(IO[bytes], gzip.open(path, "rb") if is_gzip else path.open("rb")) as file:
        while True:
            number += 1
            try:
                line = file.readline(MAX_LINE_BYTES + 1)
            except (EOFError, zlib.error, gzip.BadGzipFile):
                raise InputError(
                    f"{path.name}, line {number}: the gzip stream is truncated or corrupt; "
                    "nothing was imported."
                ) from None
            if not line:
                return
            total += len(line)
            if len(line) > MAX_LINE_BYTES:
                raise InputError(
                    f"{path.name}, line {number}: longer than {MAX_LINE_BYTES // 2**20} MiB. Split "
                    "the record."
                )
            if is_gzip and total > max(BOMB_BYTES, BOMB_RATIO * compressed_size):
                raise InputError(
                    f"{path.name}, line {number}: expands more than {BOMB_RATIO} times; refused as a "
                    "decompression bomb. Unpack it yourself if it is meant."
                )
            if line.strip():
                yield number, line


def _parse(line: bytes, where: str) -> dict[str, Any]:
    if b"\x00" in line:
        raise InputError(f"{where}: contains a NUL byte.")
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise InputError(f"{where}: not valid UTF-8.") from None
    # ValueError beside JSONDecodeError: a number of thousands of digits.
    except (ValueError, RecursionError):
        raise InputError(f"{where}: not valid JSON.") from None
    if not isinstance(fields, dict):
        raise InputError(f"{where}: not a JSON object.")
    return cast(dict[str, Any], fields)


def _find_column(fields: dict[str, Any], known: tuple[str, ...], what: str, where: str) -> str:
    found = [name for name in known if name in fields]
    if not found:
        raise InputError(
            f"{where}: no {what} column among {', '.join(known)}. Name it with --{what}."
        )
    return found[0]


def _text_of(fields: dict[str, Any], column: str, where: str) -> str:
    value = fields.get(column)
    if not isinstance(value, str):
        raise InputError(f"{where}: field {column!r} is missing or not a string.")
    _refuse_unwritable(value, column, where)
    return value


def _owners_of(fields: dict[str, Any], column: str, where: str) -> tuple[str, ...]:
    """The owners as strings; none if any of them is missing."""
    value: Any = fields.get(column)
    entries = cast(list[Any], value if isinstance(value, list) else [value])
    owners: list[str] = []
    for entry in entries:
        if entry is None or (isinstance(entry, str) and not entry.strip()):
            return ()
        # A float such as 1.0 is refused: whether it is user 1 is not for us to guess.
        if isinstance(entry, bool) or not isinstance(entry, str | int):
            raise InputError(
                f"{where}: field {column!r} must hold user ids as strings or whole numbers, not "
                f"{type(entry).__name__}."
            )
        owners.append(str(entry))
        _refuse_unwritable(owners[-1], column, where)
    return tuple(owners)


def _refuse_unwritable(value: str, column: str, where: str) -> None:
    if "\x00" in value or any("\ud800" <= char <= "\udfff" for char in value):
        raise InputError(f"{where}: field {column!r} contains a NUL or a lone surrogate.")
