"""Reading untrusted files in bounded memory: gzip, long lines, decompression bombs, links.

Every refusal names the file and the line.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from userdp.errors import InputError

# A longer line is a mistake or an attack. It is refused before it fills the memory.
MAX_LINE_BYTES = 32 * 2**20
# A compressed file that grows beyond both limits is refused as a decompression bomb. Text
# compresses 3 to 10 times, and very regular logs 50 times. Deflate can reach 1,032 times.
BOMB_BYTES = 64 * 2**20
BOMB_RATIO = 100

PIECE_BYTES = 2**20


def is_gzip(path: Path) -> bool:
    """Whether the file begins like a gzip stream."""
    if not path.is_file():
        raise InputError(f"{path}: no such file.")
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


@contextmanager
def open_bytes(path: Path) -> Generator[IO[bytes]]:
    """The file's bytes, unpacked if it is gzip."""
    with cast(IO[bytes], gzip.open(path, "rb") if is_gzip(path) else path.open("rb")) as file:
        yield file


class _Meter:
    """Watches how far a compressed file expands."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._limit = max(BOMB_BYTES, BOMB_RATIO * path.stat().st_size) if is_gzip(path) else None
        self._total = 0

    def add(self, num_bytes: int, line: int) -> None:
        self._total += num_bytes
        if self._limit is not None and self._total > self._limit:
            raise InputError(
                f"{self._name}, line {line}: expands more than {BOMB_RATIO} times; refused as a "
                "decompression bomb. Unpack it yourself if it is meant."
            )


def damaged(path: Path, line: int) -> InputError:
    """The error for a gzip stream that ends early or is corrupt."""
    return InputError(
        f"{path.name}, line {line}: the gzip stream is truncated or corrupt; nothing was imported."
    )


DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile)


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """All lines with their numbers from 1, each with its line end and bounded in size."""
    meter = _Meter(path)
    number = 0
    with open_bytes(path) as file:
        while True:
            number += 1
            try:
                line = file.readline(MAX_LINE_BYTES + 1)
            except DAMAGE:
                raise damaged(path, number) from None
            if not line:
                return
            meter.add(len(line), number)
            if len(line) > MAX_LINE_BYTES:
                raise too_long(path, number)
            yield number, line


def too_long(path: Path, line: int) -> InputError:
    """The error for a line that is a mistake or an attack."""
    return InputError(
        f"{path.name}, line {line}: longer than {MAX_LINE_BYTES // 2**20} MiB. Split the record."
    )


def check_compressed(path: Path) -> None:
    """Unpack a gzip file once without keeping it, and refuse damage, bombs and endless lines."""
    if not is_gzip(path):
        return
    line, in_line = 1, 0
    for piece in pieces(path):
        newlines = piece.count(b"\n")
        in_line = len(piece) - piece.rfind(b"\n") - 1 if newlines else in_line + len(piece)
        line += newlines
        if in_line > MAX_LINE_BYTES:
            raise too_long(path, line)


def pieces(path: Path) -> Iterator[bytes]:
    """The file's bytes in pieces. Damage and bombs are refused."""
    meter = _Meter(path)
    line = 1
    with open_bytes(path) as file:
        while True:
            try:
                piece = file.read(PIECE_BYTES)
            except DAMAGE:
                raise damaged(path, line) from None
            if not piece:
                return
            line += piece.count(b"\n")
            meter.add(len(piece), line)
            yield piece
