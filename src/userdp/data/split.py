"""Training and held-out records of one store, and stores made of some of another's records.

The papers use three splits. By user: a share of the users is held out with all their records. By
beginning: the first records of every user are held out (Charles et al. 2024, App. D: 10%, at most
32 records). By time: records after a date are held out (ibid.). Only the first keeps users apart.
The others can put a user on both sides, and the caller must ask for that explicitly.

No split couples users. Where a record goes depends on each of its own owners and on its own time. A
user who leaves takes away only the records they own, and moves nobody else's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from userdp.data.belonging import link_to
from userdp.data.identity import IdRule, Pseudonyms
from userdp.data.record import NO_TIME, ImportBatch
from userdp.data.store import ImportResult, UserStore
from userdp.data.write import write_batches
from userdp.errors import InputError
from userdp.index import ranges

Numbers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Split:
    """The record numbers of both sides. Other records are on neither side, and are counted.

    `users_left_out` counts users with no record on either side, and `users_cut` users who lost some
    of theirs. `made_by` says how whole users were divided; the stores that are written keep it.
    """

    train: Numbers
    held_out: Numbers
    left_out: int
    users_left_out: int
    users_cut: int
    shares_users: bool
    made_by: str | None = None

    def __repr__(self) -> str:
        return "Split(<secret>)"


def by_user(store: UserStore, *, share: float, seed: int = 0) -> Split:
    """Hold out each user, with all their records, with probability `share`.

    The number of held-out users is binomial, so `share` is met on average. A keyed hash of the user
    alone decides. It hashes the user's pseudonym, which depends on the store's secret key. Without
    that key nobody can choose an id to get on one side, even if they know `seed`. In all stores
    imported under one key, a user is on the same side. A store that is itself a part of such a
    split is divided by new coins. With the old ones, all its users would be on one side.

    Guarantee: no user is on both sides, and one user's absence moves no other user. A record is on
    neither side if it has owners on both.
    """
    if not 0.0 < share < 1.0:
        raise InputError(f"share={share}: hold out more than none and less than all users.")
    is_held_out = _coins(store.pseudonyms.to_pylist(), seed, store.user_splits) < share
    held_out_owners = np.add.reduceat(
        is_held_out[store.record_users].astype(np.int64), store.record_users_indptr[:-1]
    )
    train = held_out_owners == 0
    held_out = held_out_owners == store.users_per_record()
    if not train.any() or not held_out.any():
        raise InputError(
            f"share={share} of {store.num_users:,} users leaves one side without a record: each "
            "user is held out by chance. Choose a share nearer to one half, or another seed."
        )
    return _split(
        store, train, held_out, shares_users=False, made_by=f"seed {seed}, share {share!r}"
    )


def _coins(pseudonyms: list[bytes], seed: int, earlier: Sequence[str]) -> NDArray[np.float64]:
    """A number in [0, 1) for each user, from the user's pseudonym and public numbers alone."""
    key = hashlib.blake2b(repr((seed, *earlier)).encode(), digest_size=32).digest()
    coins = [
        hashlib.blake2b(pseudonym, key=key, person=b"userdp split", digest_size=8).digest()
        for pseudonym in pseudonyms
    ]
    # The upper 53 bits give a float64 below 1 without rounding.
    return np.ldexp(
        (np.frombuffer(b"".join(coins), "<u8") >> np.uint64(11)).astype(np.float64), -53
    )


def beginning_of_each_user(store: UserStore, *, share: float = 0.1, at_most: int = 32) -> Split:
    """Hold out the first `share` of every user's records, rounded up, but at most `at_most`.

    Users with a single record are on neither side. Records with several owners are refused, because
    a record's place among its owner's records would depend on other users.
    Reference: Charles et al. 2024, App. D (CC-News).
    """
    if not 0.0 < share < 1.0 or at_most < 1:
        raise InputError(
            f"share={share}, at_most={at_most}: give a share below 1 and a positive cap."
        )
    shared = int((store.users_per_record() > 1).sum())
    if shared:
        raise InputError(
            f"{store.path}: {shared:,} of {store.num_records:,} records have several owners. Which "
            "records come first would then depend on other users, and one user's absence would "
            "move theirs. Split by user or by time, or import with --owners first if one owner is "
            "the whole truth."
        )
    owner = np.asarray(store.record_users)
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=store.num_users)
    begins = np.concatenate([[0], np.cumsum(counts)[:-1]])
    rank = np.empty(len(owner), np.int64)
    rank[order] = np.arange(len(owner)) - np.repeat(begins, counts)
    quota = np.minimum(np.ceil(share * counts).astype(np.int64), at_most)
    usable = (counts > 1)[owner]
    held_out = usable & (rank < quota[owner])
    return _split(store, usable & ~held_out, held_out, shares_users=True)


def by_time(store: UserStore, *, cutoff: int) -> Split:
    """Train on records written before `cutoff` (seconds since 1970 UTC), hold out the later ones.

    Records without a time are on neither side.
    """
    if store.times is None:
        raise InputError(f"{store.path}: holds no times. Import with --time COLUMN.")
    times = np.asarray(store.times)
    known = times != NO_TIME
    return _split(store, known & (times < cutoff), known & (times >= cutoff), shares_users=True)


def _split(
    store: UserStore,
    train: NDArray[np.bool_],
    held_out: NDArray[np.bool_],
    *,
    shares_users: bool,
    made_by: str | None = None,
) -> Split:
    if not train.any() or not held_out.any():
        raise InputError("one side of the split would be empty.")
    kept = train | held_out
    records_kept = np.bincount(
        store.record_users[np.repeat(kept, store.users_per_record())], minlength=store.num_users
    )
    return Split(
        train=np.flatnonzero(train),
        held_out=np.flatnonzero(held_out),
        left_out=int((~kept).sum()),
        users_left_out=int((records_kept == 0).sum()),
        users_cut=int(((records_kept > 0) & (records_kept < store.records_per_user())).sum()),
        shares_users=shares_users,
        made_by=made_by,
    )


def write_subset(
    store: UserStore,
    records: Numbers,
    out: Path,
    *,
    made_by: str | None = None,
    cautions: Sequence[str] = (),
) -> ImportResult:
    """A store of some of another's records, in their order, under the same pseudonyms.

    It inherits the other store's cautions and adds `cautions`. `made_by` is that of a `Split`. What
    is spent on it counts for the other store's population.
    """
    if out.exists():
        raise InputError(f"{out} exists: choose another output directory.")
    return write_batches(
        record_batches(store, np.sort(records)),
        out,
        pseudonyms=Pseudonyms.kept(store.manifest["key_name"], store.fingerprint_key),
        id_rule=IdRule.EXACT,
        cautions=tuple(dict.fromkeys((*store.cautions, *cautions))),
        user_splits=(*store.user_splits, *([made_by] if made_by is not None else [])),
        population=link_to(store, out),
    )


def record_batches(store: UserStore, records: Numbers) -> Iterator[ImportBatch]:
    """Some records of a store, in increasing order; pseudonyms in hex stand for the owners' ids."""
    names = pa.array([pseudonym.hex() for pseudonym in store.pseudonyms.to_pylist()], pa.string())
    bounds = np.searchsorted(records, store.chunk_starts)
    for number, chunk in enumerate(store.texts.chunks):
        wanted = records[bounds[number] : bounds[number + 1]]
        if not len(wanted):
            continue
        begins = store.record_users_indptr[wanted]
        counts = store.record_users_indptr[wanted + 1] - begins
        edges = ranges(begins, counts)
        yield ImportBatch(
            texts=chunk.take(pa.array(wanted - store.chunk_starts[number])),
            owners=names.take(pa.array(store.record_users[edges])).cast(pa.large_string()),
            owner_counts=counts,
            where=lambda row: f"record {row}",
            times=None if store.times is None else np.asarray(store.times[wanted]),
            text_kind=store.text_kind,
        )
