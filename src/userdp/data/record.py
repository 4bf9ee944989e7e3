"""What a source gives: records, or the reason why something in it is none.

`Batch` is the same in columns, for sources that can be read by the hundred thousand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from userdp.data.identity import as_is

NO_TIME = np.iinfo(np.int64).min

BATCH_RECORDS = 8192
BATCH_CHARACTERS = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Record:
    """A text and the ids of everyone it belongs to, as the source spells them.

    `time` is when it was written, in seconds since 1970 UTC, where the source says.
    """

    text: str
    owners: tuple[str, ...]
    where: str
    time: int | None = None

    def __repr__(self) -> str:
        return f"Record(<secret>, at {self.where})"


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something in the source that is no record, and why: counted, never silently lost."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Records in columns: record i has `owner_counts[i]` consecutive entries of `owners`.

    Texts that are chats are JSON lists of messages. `decode` makes the id of an entry. `where`
    names the place of a record in its source; it may be slow, for it is asked only on error.
    """

    texts: pa.LargeStringArray
    owners: pa.Array
    owner_counts: NDArray[np.int64]
    where: Callable[[int], str]
    decode: Callable[[str], str] = as_is
    times: NDArray[np.int64] | None = None
    skipped: Counter[str] = field(default_factory=Counter[str])
    is_chat: bool = False

    def __repr__(self) -> str:
        return "Batch(<secret>)"

    def __len__(self) -> int:
        return len(self.owner_counts)


def batches_of(items: Iterable[Record | Skipped], *, is_chat: bool = False) -> Iterator[Batch]:
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
            yield _batch(records, skipped, is_chat)
            records, skipped, characters = [], Counter(), 0
    if records or skipped:
        yield _batch(records, skipped, is_chat)


def _batch(records: list[Record], skipped: Counter[str], is_chat: bool) -> Batch:
    times = [NO_TIME if record.time is None else record.time for record in records]
    owners = pa.array([owner for record in records for owner in record.owners], pa.large_string())
    return Batch(
        texts=pa.array([record.text for record in records], pa.large_string()),
        owners=owners,
        owner_counts=np.fromiter((len(record.owners) for record in records), np.int64),
        where=lambda row: records[row].where,
        times=np.asarray(times, np.int64),
        skipped=skipped,
        is_chat=is_chat,
    )
