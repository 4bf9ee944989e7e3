"""Helpers: import in this process, and look at the store as plain Python values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from userdp.data.identity import Pseudonyms
from userdp.data.importers.columns import Columns
from userdp.data.sources import Format, Reading, read
from userdp.data.store import ImportResult, UserStore, write_batches

KEY = bytes(range(32))


def bring_in(
    source: Path | list[Path], out: Path, reading: Reading | None = None, **options: Any
) -> ImportResult:
    sources = [str(path) for path in (source if isinstance(source, list) else [source])]
    batches = read(sources, reading or Reading(), out.parent / "scratch")
    return write_batches(batches, out, pseudonyms=Pseudonyms.under(KEY), **options)


def reading(
    user: str | None = None,
    text: str | None = None,
    time: str | None = None,
    **others: Any,
) -> Reading:
    return Reading(columns=Columns(user=user, text=text, time=time), **others)


def contents(store: UserStore) -> list[tuple[str, list[int]]]:
    """Texts with the numbers of their owners."""
    return [
        (
            store.text(record),
            store.record_users[
                store.record_users_indptr[record] : store.record_users_indptr[record + 1]
            ].tolist(),
        )
        for record in range(store.num_records)
    ]


__all__ = ["KEY", "Format", "bring_in", "contents", "reading"]
