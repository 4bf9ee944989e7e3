"""What a source yields: records, and the reasons why something in it is not a record.

`ImportBatch` holds many records in columns, for sources that can be read that way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from userdp.data.contents import TextKind
from userdp.data.identity import as_is
from userdp.errors import InputError

NO_TIME = np.iinfo(np.int64).min

BATCH_RECORDS = 8192
BATCH_CHARACTERS = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Record:
    """A text and the ids of all its owners, as the source spells them.

    `time` is when it was written, in seconds since 1970 UTC, if the source says so.
    """

    text: str
    owners: tuple[str, ...]
    where: str
    time: int | None = None

    def __repr__(self) -> str:
        return f"Record(<secret>, at {self.where})"


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something in the source that is not a record, and why. It is counted, never lost silently."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class ImportBatch:
    """Records in columns: record i has `owner_counts[i]` consecutive entries of `owners`.

    `text_kind` says what the texts hold; all but plain text is JSON (`contents`). `decode` turns an
    entry into an id. `where` names a record's place in its source. It may be slow, because it is
    called only for an error.
    """

    texts: pa.LargeStringArray
    owners: pa.Array
    owner_counts: NDArray[np.int64]
    where: Callable[[int], str]
    decode: Callable[[str], str] = as_is
    times: NDArray[np.int64] | None = None
    skipped: Counter[str] = field(default_factory=Counter[str])
    text_kind: TextKind = "plain"

    def __repr__(self) -> str:
        return "ImportBatch(<secret>)"

    def __len__(self) -> int:
        return len(self.owner_counts)


def batches_of(
    items: Iterable[Record | Skipped], *, text_kind: TextKind = "plain"
) -> Iterator[ImportBatch]:
    """The items in batches of bounded size, in order.

    >>> items = [Record("hi", ("ann", "bob"), "line 1"), Skipped("empty")]
    >>> [len(batch) for batch in batches_of(items)]
    [1]
    """
    records: list[Record] = []
    skipped: Counter[str] = Counter()
    characters = 0
    for item in items:
        if isinstance(item, Skipped):
            skipped[item.reason] += 1
            continue
        records.append(item)
        characters += len(item.text)
        if len(records) >= BATCH_RECORDS or characters >= BATCH_CHARACTERS:
            yield _batch(records, skipped, text_kind)
            records, skipped, characters = [], Counter(), 0
    if records or skipped:
        yield _batch(records, skipped, text_kind)


def nothing_to_import(skipped: Counter[str]) -> InputError:
    """Say that nothing was found, and why what was looked at is no record."""
    why = ", ".join(f"{count:,}: {reason}" for reason, count in skipped.items() if count)
    return InputError(
        "no record was found: there is nothing to import." + (f" Skipped {why}." if why else "")
    )


def _batch(records: list[Record], skipped: Counter[str], text_kind: TextKind) -> ImportBatch:
    times = [NO_TIME if record.time is None else record.time for record in records]
    owners = pa.array([owner for record in records for owner in record.owners], pa.large_string())
    return ImportBatch(
        texts=pa.array([record.text for record in records], pa.large_string()),
        owners=owners,
        owner_counts=np.fromiter((len(record.owners) for record in records), np.int64),
        where=lambda row: records[row].where,
        times=np.asarray(times, np.int64),
        skipped=skipped,
        text_kind=text_kind,
    )
