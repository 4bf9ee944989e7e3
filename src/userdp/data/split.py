"""Training and held-out records of one store, and stores made of some of another's records.

Three splits of the papers: by user (a share of the users is held out with all their records), the
beginning of every user's data (Charles et al. 2024, App. D: the first 10%, at most 32 records),
and by time (ibid.: before and after a date). Only the first keeps users apart; the others put one
user on both sides, and whoever asks for them must say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from userdp.data.identity import IdRule, Pseudonyms
from userdp.data.record import NO_TIME, Batch
from userdp.data.store import ImportResult, UserStore
from userdp.data.write import write_batches
from userdp.errors import InputError

Numbers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Split:
    """Record numbers on either side; the rest is in neither, and counted."""

    train: Numbers
    held_out: Numbers
    left_out: int
    shares_users: bool

    def __repr__(self) -> str:
        return "Split(<secret>)"


def by_user(store: UserStore, *, share: float, rng: np.random.Generator) -> Split:
    """Hold out `share` of the users, drawn by `rng`, with all their records.

    Guarantee: no user is on both sides. A record whose owners are on both sides is in neither.
    """
    if not 0.0 < share < 1.0:
        raise InputError(f"share={share}: hold out more than none and less than all users.")
    num_held_out = round(share * store.num_users)
    if num_held_out in (0, store.num_users):
        raise InputError(
            f"share={share} of {store.num_users:,} users is {num_held_out}: one side is empty."
        )
    is_held_out = np.zeros(store.num_users, dtype=bool)
    is_held_out[rng.permutation(store.num_users)[:num_held_out]] = True
    held_out_owners = np.add.reduceat(
        is_held_out[store.record_users].astype(np.int64), store.record_users_indptr[:-1]
    )
    train = held_out_owners == 0
    held_out = held_out_owners == store.users_per_record()
    return _split(train, held_out, shares_users=False)


def beginning_of_each_user(store: UserStore, *, share: float = 0.1, at_most: int = 32) -> Split:
    """Hold out the first `share` of every user's records, rounded up, but at most `at_most`.

    Users with a single record are in neither side. A record of several owners counts as its first
    owner's. Reference: Charles et al. 2024, App. D (CC-News).
    """
    if not 0.0 < share < 1.0 or at_most < 1:
        raise InputError(
            f"share={share}, at_most={at_most}: give a share below 1 and a positive cap."
        )
    owner = np.asarray(store.record_users[store.record_users_indptr[:-1]])
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=store.num_users)
    begins = np.concatenate([[0], np.cumsum(counts)[:-1]])
    rank = np.empty(len(owner), np.int64)
    rank[order] = np.arange(len(owner)) - np.repeat(begins, counts)
    quota = np.minimum(np.ceil(share * counts).astype(np.int64), at_most)
    usable = (counts > 1)[owner]
    held_out = usable & (rank < quota[owner])
    return _split(usable & ~held_out, held_out, shares_users=True)


def by_time(store: UserStore, *, cutoff: int) -> Split:
    """Train on records written before `cutoff` (seconds since 1970 UTC), hold out the later ones.

    Records without a time are in neither side.
    """
    if store.times is None:
        raise InputError(f"{store.path}: holds no times. Import with --time COLUMN.")
    times = np.asarray(store.times)
    known = times != NO_TIME
    return _split(known & (times < cutoff), known & (times >= cutoff), shares_users=True)


def _split(train: NDArray[np.bool_], held_out: NDArray[np.bool_], *, shares_users: bool) -> Split:
    if not train.any() or not held_out.any():
        raise InputError("one side of the split would be empty.")
    return Split(
        train=np.flatnonzero(train),
        held_out=np.flatnonzero(held_out),
        left_out=int((~(train | held_out)).sum()),
        shares_users=shares_users,
    )


def write_subset(store: UserStore, records: Numbers, out: Path) -> ImportResult:
    """A store of some of another's records, in their order, under the same pseudonyms."""
    return write_batches(
        _batches(store, np.sort(records)),
        out,
        pseudonyms=Pseudonyms.kept(store.manifest["key_name"], store.fingerprint_key),
        id_rule=IdRule.EXACT,
    )


def _batches(store: UserStore, records: Numbers) -> Iterator[Batch]:
    names = pa.array([pseudonym.hex() for pseudonym in store.pseudonyms.to_pylist()], pa.string())
    bounds = np.searchsorted(records, store.chunk_starts)
    for number, chunk in enumerate(store.texts.chunks):
        wanted = records[bounds[number] : bounds[number + 1]]
        if not len(wanted):
            continue
        begins = store.record_users_indptr[wanted]
        counts = store.record_users_indptr[wanted + 1] - begins
        ends = np.cumsum(counts)
        edges = np.arange(ends[-1]) + np.repeat(begins - (ends - counts), counts)
        yield Batch(
            texts=chunk.take(pa.array(wanted - store.chunk_starts[number])),
            owners=names.take(pa.array(store.record_users[edges])).cast(pa.large_string()),
            owner_counts=counts,
            where=lambda row: f"record {row}",
            times=None if store.times is None else np.asarray(store.times[wanted]),
            is_chat=store.manifest["text_kind"] == "chat",
        )
