"""The file that a population's spending is written to: append-only, chained, keyed and locked.

    STORE.population/budget.jsonl         one row for each thing that was spent, or declared
    STORE.population/secret/budget.key    the key of its rows
    STORE.population/secret/budget.head   how many rows there are, and the hash of the last

Rows are chained (`files/chain.py`), so an edited byte is found. A chain does not show that its end
was cut off; the head does. It is written after each row, so after a kill there may be one row more
than it counts, and that row is valid. There are never fewer. A row that a kill left half written
was never acknowledged: the next writer cuts it off.

Whoever can put back an old copy of the whole directory can take spending back. No file on the same
disk can show that.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from userdp.errors import LedgerError
from userdp.files import chain, durable
from userdp.files.chain import Row
from userdp.files.lock import Lock, hold

FORMAT = 1

ROWS = "budget.jsonl"
HEAD = "budget.head"

# A writer holds the lock for as long as one price takes, which is at most some seconds.
WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.02

RESTORE = "Restore the whole directory from a copy"


@dataclass(frozen=True, kw_only=True)
class _Found:
    """The rows on disk, and what the head says of them."""

    rows: list[Row]
    key: bytes
    size: int
    torn: bool
    head_is_behind: bool


class BudgetFile:
    """The rows of the population in `directory`. Nothing is kept in memory between two calls."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def path(self) -> Path:
        """The file of the rows."""
        return self.directory / ROWS

    @property
    def exists(self) -> bool:
        """Whether there is anything in its place, even something damaged."""
        return self.directory.exists()

    def create(self, first: Row) -> None:
        """Make the directory with this first row, whole or not at all.

        If another process was faster, its directory stays, and this row is forgotten.
        """
        # The name is new each time, so two processes never fill one directory.
        partial = self.directory.with_name(f".{self.directory.name}.{secrets.token_hex(8)}.partial")
        try:
            partial.mkdir(mode=durable.OWNER_ONLY_DIRECTORY)
            try:
                key = chain.new_key()
                chain.write_key(partial / ROWS, key)
                row = chain.sealed("", {"kind": "population", "format": FORMAT} | first, key)
                durable.write_file(partial / ROWS, _line(row), mode=durable.OWNER_ONLY_FILE)
                _write_head(partial, [row], key)
                durable.sync_tree(partial)
                # Fails if a directory with something in it is there.
                partial.rename(self.directory)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            durable.sync_directory(self.directory.parent)
        except OSError as error:
            if not self.path.is_file():
                raise LedgerError(
                    f"{self.directory} cannot be written ({error.strerror}): what is spent on "
                    "these people is counted there, beside their store. Make its parent directory "
                    "writable, or copy the store to one that is."
                ) from None

    def rows(self) -> list[Row]:
        """All rows, each byte of them checked; the first describes the population."""
        # The lock keeps out a writer between the rows and their count.
        with self._open("rb") as file:
            return self._check(file).rows

    @contextmanager
    def adding(self) -> Generator[Adding, None, None]:
        """The rows as they are, and a way to add one, while nobody else reads or adds any."""
        with self._open("r+b") as file:
            found = self._check(file)
            try:
                if found.torn:
                    file.truncate(found.size)
                    os.fsync(file.fileno())
                if found.head_is_behind:
                    _write_head(self.directory, found.rows, found.key)
            except OSError as error:
                raise _unwritable(self.path, error) from None
            yield Adding(self, file, found)

    @contextmanager
    def _open(self, mode: str) -> Generator[IO[bytes], None, None]:
        try:
            # Without a buffer, a failed write leaves nothing to be written later.
            file = self.path.open(mode, buffering=0)
        except OSError as error:
            raise LedgerError(
                f"{self.path} cannot be opened ({error.strerror}), and {self.directory} is there: "
                f"what was spent on these people is not known. {RESTORE}."
            ) from None
        with file:
            lock = _wait_for(file, self.path)
            try:
                yield file
            finally:
                lock.release()

    def _check(self, file: IO[bytes]) -> _Found:
        """Everything that is on disk, with every byte checked."""
        key = chain.read_key(self.path)
        if key is None:
            raise LedgerError(
                f"{chain.key_path(self.path)} is not there: without it nobody can tell whether "
                f"rows are missing. {RESTORE}."
            )
        content = file.read()
        size = content.rfind(b"\n") + 1
        rows = _parsed(content[:size], key, self.path)
        counted, last = _read_head(self.directory, key)
        if len(rows) < counted or not rows:
            raise LedgerError(
                f"{self.path}: {counted:,} rows were written, and {len(rows):,} whole ones are "
                f"left: its end was cut off. {RESTORE}."
            )
        torn, behind = size < len(content), len(rows) > counted
        if len(rows) > counted + 1 or rows[counted - 1]["hash"] != last or (torn and behind):
            raise LedgerError(
                f"{self.path}: its rows are not those that were counted in {HEAD}. {RESTORE}."
            )
        return _Found(rows=rows, key=key, size=size, torn=torn, head_is_behind=behind)


class Adding:
    """A population file that is locked for this writer."""

    def __init__(self, budget: BudgetFile, file: IO[bytes], found: _Found) -> None:
        self._budget = budget
        self._file = file
        self._key = found.key
        self._size = found.size
        self.rows = found.rows

    def add(self, row: Row) -> None:
        """Add a row; returns once it is on disk and counted.

        An error leaves the file as it was. If only the last flush fails, after the row was counted,
        the row stays: too much is then counted, never too little.
        """
        sealed = chain.sealed(self.rows[-1]["hash"], row, self._key)
        line = _line(sealed)
        try:
            try:
                self._file.seek(self._size)
                rest = line
                while rest:
                    rest = rest[self._file.write(rest) :]
                os.fsync(self._file.fileno())
                _write_head(self._budget.directory, [*self.rows, sealed], self._key)
            except OSError:
                if _read_head(self._budget.directory, self._key)[0] == len(self.rows):
                    self._file.truncate(self._size)
                    os.fsync(self._file.fileno())
                raise
        except OSError as error:
            raise _unwritable(self._budget.path, error) from None
        self._size += len(line)
        self.rows.append(sealed)


def _unwritable(path: Path, error: OSError) -> LedgerError:
    return LedgerError(
        f"{path} cannot be written ({error.strerror}), and nothing is released before it is "
        "counted there. Make room, or make it writable, and try again."
    )


def _wait_for(file: IO[bytes], path: Path) -> Lock:
    """Lock the file. Another writer is done in a moment, so wait for it."""
    end = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return hold(file.fileno(), path)
        except LedgerError:
            if time.monotonic() > end:
                raise LedgerError(
                    f"{path}: another process has held it for {WAIT_SECONDS:.0f} seconds. Wait "
                    "until that one ends, or end it, and try again."
                ) from None
            time.sleep(_POLL_SECONDS)


def _line(row: Row) -> bytes:
    return chain.canonical(row).encode() + b"\n"


def _parsed(content: bytes, key: bytes, path: Path) -> list[Row]:
    rows: list[Row] = []
    before = ""
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        row: Row = {}
        try:
            row = json.loads(line)
            bare = {name: value for name, value in row.items() if name not in ("tag", "hash")}
            is_ours = _line(chain.sealed(before, bare, key)) == line + b"\n"
        except (ValueError, AttributeError, TypeError, RecursionError):
            is_ours = False
        if not is_ours:
            raise LedgerError(
                f"{path}, line {number}: this row, or one before it, is not as it was written, or "
                f"the key beside it is another one. {RESTORE}."
            )
        before = row["hash"]
        rows.append(row)
    if rows and (rows[0].get("kind") != "population" or rows[0].get("format") != FORMAT):
        raise LedgerError(f"{path}: written in a format this version does not read.")
    return rows


def _write_head(directory: Path, rows: list[Row], key: bytes) -> None:
    head: Row = {"rows": len(rows), "hash": rows[-1]["hash"]}
    durable.write_file(
        directory / "secret" / HEAD,
        _line(head | {"tag": chain.tag(key, "head", head)}),
        mode=durable.OWNER_ONLY_FILE,
    )


def _read_head(directory: Path, key: bytes) -> tuple[int, str]:
    """The number of rows, and the hash of the last."""
    place = directory / "secret" / HEAD
    try:
        content = place.read_bytes()
        found = json.loads(content)
        head: Row = {"rows": found["rows"], "hash": found["hash"]}
        is_ours = _line(head | {"tag": chain.tag(key, "head", head)}) == content
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        is_ours = False
        head = {}
    if not is_ours:
        raise LedgerError(
            f"{place}: missing, or not as it was written; without it nobody can tell whether rows "
            f"are missing. {RESTORE}."
        )
    return head["rows"], head["hash"]
