"""The files a store is made of: texts as Arrow, numbers as `.npy`, written piece by piece.

Each writer also hashes what it writes. The hash does not depend on the pieces, so a store's
fingerprint depends on its content only.
"""

from __future__ import annotations

import hashlib
import hmac
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

# Type checkers do not see its functions, because they are made at import.
pc: Any = pyarrow.compute

TEXT_SCHEMA = pa.schema([("text", pa.large_string())])
NPY_HEADER_BYTES = 128
PIECE = 2**20


class TextDigest:
    """Hashes texts: all their bytes, and all their lengths."""

    def __init__(self) -> None:
        self._bytes = hashlib.sha256()
        self._lengths = hashlib.sha256()

    def update(self, texts: pa.LargeStringArray) -> None:
        """Add texts."""
        _, offset_buffer, data = texts.buffers()
        offsets = np.frombuffer(offset_buffer, np.int64)[texts.offset :][: len(texts) + 1]
        self._lengths.update(np.diff(offsets).astype("<i8").data)
        if data is not None:
            self._bytes.update(memoryview(data)[int(offsets[0]) : int(offsets[-1])])

    def digest(self) -> bytes:
        """The digest of everything added."""
        return self._bytes.digest() + self._lengths.digest()


def fingerprint(
    texts: bytes, record_users_indptr: bytes, record_users: bytes, *, key: bytes
) -> str:
    """The name of a store's content, from the digests of texts and edges and a secret key.

    The name is public, because ledgers contain it. Without the key nobody can use it to test a
    guess at one record, even if they know all others.
    """
    content = b"userdp store 3" + texts + record_users_indptr + record_users
    return keyed_digest(content, key=key)


def keyed_digest(content: bytes, *, key: bytes) -> str:
    """HMAC-SHA256 of `content`, in hexadecimal."""
    return hmac.digest(key, content, "sha256").hex()


class _Writer(ABC):
    """Closes its file at the end of a `with` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Finish the file."""


class TextWriter(_Writer):
    """Writes the column `text` of `records.arrow`."""

    def __init__(self, path: Path) -> None:
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._sink, TEXT_SCHEMA)
        self._digest = TextDigest()

    def write(self, texts: pa.LargeStringArray) -> None:
        """Append texts."""
        if not len(texts):
            return
        self._writer.write_batch(pa.record_batch([texts], TEXT_SCHEMA))
        self._digest.update(texts)

    def digest(self) -> bytes:
        """The digest of all texts."""
        return self._digest.digest()

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()
        self._sink.close()


class ArrayWriter(_Writer):
    """Writes a one-dimensional int64 `.npy` whose length is not known in advance."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._file.write(bytes(NPY_HEADER_BYTES))
        self._length = 0
        self._hash = hashlib.sha256()

    def write(self, numbers: NDArray[np.int64]) -> None:
        """Append numbers."""
        data = np.ascontiguousarray(numbers, "<i8").data
        self._file.write(data)
        self._hash.update(data)
        self._length += len(numbers)

    def write_indptr(self, counts: NDArray[np.integer]) -> None:
        """Append 0 and the running sums of `counts`."""
        self.write(np.zeros(1, np.int64))
        total = 0
        for start in range(0, len(counts), PIECE):
            sums = np.cumsum(counts[start : start + PIECE], dtype=np.int64) + total
            self.write(sums)
            total = int(sums[-1])

    def digest(self) -> bytes:
        """The digest of all numbers, as 64-bit little-endian integers."""
        return self._hash.digest()

    def close(self) -> None:
        """Write the header, now that the length is known, and finish the file."""
        self._file.seek(0)
        np.lib.format.write_array_header_1_0(
            self._file, {"shape": (self._length,), "fortran_order": False, "descr": "<i8"}
        )
        assert self._file.tell() == NPY_HEADER_BYTES
        self._file.close()


def array_digest(numbers: NDArray[np.int64]) -> bytes:
    """What `ArrayWriter.digest` gave when the array was written."""
    hashed = hashlib.sha256()
    for start in range(0, len(numbers), PIECE):
        hashed.update(np.ascontiguousarray(numbers[start : start + PIECE], "<i8").data)
    return hashed.digest()


def read_texts(path: Path) -> pa.ChunkedArray:
    """The column `text`, memory-mapped."""
    return read_column(path, "text")


def read_column(path: Path, name: str) -> pa.ChunkedArray:
    """A column of an Arrow file, memory-mapped."""
    with pa.memory_map(str(path), "r") as source:
        return pa.ipc.open_file(source).read_all().column(name)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
