"""Chained rows: each is hashed with all rows before it, and tagged with the key of its owner.

The hash needs no key. Anyone can see that a row was edited, moved or taken from the middle, unless
whoever did it hashed everything again. The tag needs the key, so only the key's owner can make one.
No tag can show whether the owner told the truth.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from userdp.errors import LedgerError
from userdp.files.durable import sync_directory

Row = dict[str, Any]

KEY_BYTES = 32


def canonical(row: Row) -> str:
    """The only accepted way to write a row: any other byte in its place is found."""
    return json.dumps(row, sort_keys=True, allow_nan=False)


def chained(before: str, row: Row) -> str:
    """The hash of a row, tag included, that comes after the hash `before`."""
    return hashlib.sha256((before + canonical(row)).encode()).hexdigest()


def tag(key: bytes, before: str, row: Row) -> str:
    """The owner's mark on a row that comes after the hash `before`."""
    return hmac.digest(key, (before + canonical(row)).encode(), "sha256").hex()


def sealed(before: str, row: Row, key: bytes) -> Row:
    """The row with its tag and its hash."""
    marked = row | {"tag": tag(key, before, row)}
    return marked | {"hash": chained(before, marked)}


def read_content(path: Path) -> bytes:
    """Every byte of the file at `path`, which must be there."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise LedgerError(f"{path} is not there: is this the directory of a run?") from None


def rows_of(content: bytes, path: Path, key: bytes | None) -> Iterator[Row]:
    """The rows in `content` (of the file at `path`), one after the other.

    Every byte is checked; tags are checked only with the key. Whoever needs only some of the rows
    never holds all of them.
    """
    before = ""
    for number, line in enumerate(io.BytesIO(content), start=1):
        if not line.endswith(b"\n"):
            raise LedgerError(f"{path}: its last row is cut short.")
        try:
            row: Row = json.loads(line)
            claimed = row.pop("hash")
            exact = canonical(row | {"hash": claimed}).encode() + b"\n" == line
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise LedgerError(f"{path}, line {number}: not a ledger row.") from None
        if not exact or claimed != chained(before, row):
            raise LedgerError(
                f"{path}, line {number}: the hash chain breaks here; a row was edited or removed."
            )
        content_alone = {name: value for name, value in row.items() if name != "tag"}
        if key is not None and row.get("tag") != tag(key, before, content_alone):
            raise LedgerError(
                f"{path}, line {number}: this row was not written with the run's key: somebody "
                "else wrote it, or the key is another run's."
            )
        before = row["hash"] = claimed
        yield row


def without_torn_row(content: bytes) -> bytes:
    """The content as it was before a write that was stopped in its middle.

    What a row is about happens only after the row is on the disk, newline included. So a part of a
    row is about nothing that happened. A row that lacks nothing but its newline is kept, because
    counting it is never wrong.

    >>> without_torn_row(b'{"a": 1}\\n{"b"'), without_torn_row(b'{"a": 1}\\n{"b": 2}')
    (b'{"a": 1}\\n', b'{"a": 1}\\n{"b": 2}\\n')
    """
    whole, newline, torn = content.rpartition(b"\n")
    if not torn:
        return content
    try:
        json.loads(torn)
    except ValueError:
        return whole + newline
    return content + b"\n"


def key_path(path: Path) -> Path:
    """Where the key for the rows in `path` lies: beside them, in a directory of its own."""
    return path.parent / "secret" / f"{path.stem}.key"


def write_key(path: Path, key: bytes) -> None:
    """Write the key where only its owner can read it."""
    place = key_path(path)
    write_private(place, key.hex().encode() + b"\n")


def read_key(path: Path) -> bytes | None:
    """The key for the rows in `path`; None if there is none."""
    place = key_path(path)
    if not place.is_file():
        return None
    try:
        key = bytes.fromhex(place.read_text(encoding="ascii"))
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise LedgerError(f"{place}: not a key of a ledger; restore it, or take it away.")
    return key


def write_private(place: Path, content: bytes) -> None:
    """Write a new file, and its directory if needed, that only the owner can read."""
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise LedgerError(f"{place} is there already: choose another output directory.") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(place.parent)


def new_key() -> bytes:
    """256 bits from the operating system."""
    return secrets.token_bytes(KEY_BYTES)


class Turn:
    """A lock that a copy of its owner does not share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def acquire(self, *, blocking: bool = True) -> bool:
        """Whether it is now held by the caller."""
        return self._lock.acquire(blocking=blocking)

    def release(self) -> None:
        """Let the next one have it."""
        self._lock.release()

    def __reduce__(self) -> tuple[type[Turn], tuple[()]]:
        # A lock cannot be copied; a copy of a ledger begins with a free one.
        return Turn, ()
