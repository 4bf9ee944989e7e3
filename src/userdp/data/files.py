"""The texts of a store as Arrow, written piece by piece, and the store's fingerprint.

The writer also hashes what it writes. The hash does not depend on the pieces, so a store's
fingerprint depends on its content only. Numbers are in `array_files`.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from userdp.data.array_files import FileWriter

# Type checkers do not see its functions, because they are made at import.
pc: Any = pyarrow.compute

TEXT_SCHEMA = pa.schema([("text", pa.large_string())])


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


class TextWriter(FileWriter):
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


def read_texts(path: Path) -> pa.ChunkedArray:
    """The column `text`, memory-mapped."""
    return read_column(path, "text")


def read_column(path: Path, name: str) -> pa.ChunkedArray:
    """A column of an Arrow file, memory-mapped."""
    with pa.memory_map(str(path), "r") as source:
        return pa.ipc.open_file(source).read_all().column(name)
