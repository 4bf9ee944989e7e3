"""Files and directories that are there whole or not at all, whatever stops the program.

New content is written beside its place, flushed to the disk, and renamed into its place. A rename
is one act for the file system. The directory is flushed after it, so the new name survives a power
cut.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OWNER_ONLY_FILE = 0o600
OWNER_ONLY_DIRECTORY = 0o700


def write_file(place: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Replace the file at `place` with `content`, whole or not at all."""
    partial = place.with_name(f".{place.name}.partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, place)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_directory(place.parent)


@contextmanager
def new_directory(place: Path, *, mode: int = 0o755) -> Iterator[Path]:
    """A directory to fill. It appears at `place` when the block ends without an error.

    What was at `place` before is replaced.
    """
    partial = place.with_name(f".{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=mode, parents=True)
    try:
        yield partial
        sync_tree(partial)
        if place.exists():
            # A directory cannot be renamed onto a full one. Until the second rename there is none
            # at `place`; whoever reads it then finds nothing, never a mixture.
            shutil.rmtree(place)
        os.replace(partial, place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_directory(place.parent)


def sync_tree(directory: Path) -> None:
    """Flush every file below `directory`, and every directory, to the disk."""
    for path in sorted(directory.rglob("*"), reverse=True):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        elif path.is_dir():
            sync_directory(path)
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    """Flush the names in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
