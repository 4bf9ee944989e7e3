"""Numbers as `.npy`, written piece by piece, and digests of files.

The writer also hashes what it writes. The hash does not depend on the pieces. Nothing here needs
Arrow, so tokens and checkpoints can be read where it is not installed.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

# The length of a user's pseudonym, which is a keyed digest.
PSEUDONYM_BYTES = 16
NPY_HEADER_BYTES = 128
PIECE = 2**20


class FileWriter(ABC):
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


class ArrayWriter(FileWriter):
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


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
