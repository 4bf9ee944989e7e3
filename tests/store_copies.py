"""Copies of small stores that were written once (a helper, not a test)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Hashable
from pathlib import Path


class Copies:
    """Stores that were written once, where copies of them are taken from.

    Writing a small store takes 30 ms, nearly all of it for a database that is set up and thrown
    away; nothing in it is drawn at random. Outside pytest there is no folder, and no copy.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._written: dict[Hashable, Path] = {}

    def keep_in(self, folder: Path) -> None:
        """Keep what is written from now on in this folder."""
        self._folder, self._written = folder, {}

    def make(self, name: Hashable, path: Path, write: Callable[[Path], object]) -> None:
        """Put the store of this name at `path`. The first time `write` writes it."""
        if self._folder is None:
            write(path)
            return
        if name not in self._written:
            kept = self._folder / str(len(self._written))
            write(kept)
            self._written[name] = kept
        shutil.copytree(self._written[name], path)


COPIES = Copies()
