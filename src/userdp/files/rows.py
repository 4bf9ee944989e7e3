"""A file of rows that one process appends to. Every row is on the disk before the call returns."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

from userdp.errors import LedgerError
from userdp.files import chain
from userdp.files.durable import sync_directory
from userdp.files.lock import Lock, hold


class RowsFile:
    """An open file of rows, locked until `close`."""

    def __init__(self, file: io.FileIO, lock: Lock) -> None:
        self._file = file
        self._lock = lock

    @staticmethod
    def create(path: Path, key: bytes) -> RowsFile:
        """A new file, with its key beside it. A file that is there is never overwritten."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
        try:
            file = io.FileIO(os.open(path, flags, 0o644), "a")
        except FileExistsError:
            raise LedgerError(
                f"{path} already holds a run: choose another output directory."
            ) from None
        lock = None
        try:
            lock = hold(file.fileno(), path)
            chain.write_key(path, key)
            sync_directory(path.parent)
        except BaseException:
            path.unlink()
            if lock is not None:
                lock.release()
            file.close()
            raise
        return RowsFile(file, lock)

    @staticmethod
    def open(path: Path) -> RowsFile:
        """The file at `path`, to continue."""
        try:
            # Opened in this way, a missing file is not made.
            file = io.FileIO(os.open(path, os.O_WRONLY | os.O_APPEND), "a")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise LedgerError(f"{path} is not there: is this the directory of a run?") from None
        try:
            lock = hold(file.fileno(), path)
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                # The lock is on the file that was there before.
                lock.release()
                raise LedgerError(f"{path} was moved or replaced at this moment: try again.")
            return RowsFile(file, lock)
        except BaseException:
            file.close()
            raise

    def put_right(self, content: bytes, right: bytes) -> None:
        """Change the end of the file, which holds `content`, so that it holds `right`."""
        if right == content:
            return
        if len(right) > len(content):
            self.append(right[len(content) :])
            return
        self._file.truncate(len(right))
        os.fsync(self._file.fileno())

    def append(self, line: bytes) -> None:
        """Add a line; returns once it is on the disk.

        If that fails, a part of the line may be left. It is cut off again if that is possible.
        """
        length = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                # A file system may take only a part at a time.
                line = line[os.write(self._file.fileno(), line) :]
            os.fsync(self._file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                self._file.truncate(length)
            raise

    def close(self) -> None:
        """Close the file and release the lock."""
        # The owner's name goes first: afterwards somebody else may hold the lock.
        self._lock.release()
        self._file.close()
