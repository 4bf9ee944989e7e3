"""Which users own which record: all that contribution bounding sees of the data.

A record is a hyperedge over users, so the owners of all records are a hypergraph G = (V, E) with
|V| = `num_users` and |E| = `num_records` (Ganesh et al. 2025, Sec. 2). Fixed-graph privacy treats
the graph as public, but not the text, so bounding algorithms never take a record's text. The graph
should be kept confidential all the same, so it is never printed.
"""

from __future__ import annotations

import hashlib
import struct
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from userdp.compiled import compiled
from userdp.data.store import UserStore
from userdp.errors import InputError
from userdp.index import indptr_of

Ints = NDArray[np.int64]
Owners = NDArray[np.signedinteger[Any]]

# Arrays are hashed in slices of this many entries, to avoid a second copy.
_HASH_SLICE = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Edges:
    """The owners of record i are `owners[indptr[i]:indptr[i + 1]]`: at least one, all distinct.

    Use `Edges.of`, `Edges.from_lists` or `Edges.load` to make one, because they check it.
    """

    indptr: Ints
    owners: Owners
    num_users: int

    def __repr__(self) -> str:
        return "Edges(<confidential>)"

    @property
    def num_records(self) -> int:
        """|E|, the number of records."""
        return len(self.indptr) - 1

    @property
    def num_incidences(self) -> int:
        """The number of pairs (record, owner)."""
        return len(self.owners)

    @property
    def nbytes(self) -> int:
        """Bytes of the edge list."""
        return self.indptr.nbytes + self.owners.nbytes

    def cardinality(self) -> Ints:
        """The number of owners |e| of each record."""
        return np.diff(self.indptr)

    def degrees(self) -> Ints:
        """The number of records of each user."""
        return np.bincount(self.owners, minlength=self.num_users)

    def record_of_incidence(self) -> Ints:
        """The record of each entry of `owners`."""
        return np.repeat(np.arange(self.num_records), self.cardinality())

    def contributions(self, multiplicity: Ints) -> Ints:
        """How many records of a selection each user owns, copies counted.

        >>> Edges.from_lists([[0, 1], [1]], num_users=2).contributions(np.array([1, 2])).tolist()
        [1, 3]
        """
        totals = np.zeros(self.num_users, dtype=np.int64)
        _add_contributions(self.indptr, self.owners, multiplicity, totals)
        return totals

    def digest(self) -> str:
        """A sha256 of the graph. Every selection stores the digest of the edges it was made for."""
        sha = hashlib.sha256(f"edges {self.num_records} {self.num_users}".encode())
        for array in (self.indptr, self.owners):
            for start in range(0, len(array), _HASH_SLICE):
                sha.update(array[start : start + _HASH_SLICE].astype("<i8").tobytes())
        return sha.hexdigest()

    @staticmethod
    def of(indptr: ArrayLike, owners: ArrayLike, *, num_users: int) -> Edges:
        """The edges of two arrays, checked. An owner named twice by one record counts once.

        Raises `InputError` for a record without owners, for an owner number that is negative or not
        below `num_users`, and for arrays that do not fit together.

        >>> Edges.of([0, 2, 4], [0, 1, 1, 1], num_users=2).cardinality().tolist()
        [2, 1]
        """
        starts = _integers("indptr", indptr).astype(np.int64, copy=False)
        numbers = _integers("indices", owners)
        if num_users < 1:
            raise InputError(f"n_users={num_users}: a graph of owners has at least one user.")
        if len(starts) == 0 or starts[0] != 0 or starts[-1] != len(numbers):
            raise InputError(
                f"indptr must start at 0 and end at {len(numbers)}, the length of indices: "
                "record i has the owners indices[indptr[i]:indptr[i+1]]."
            )
        fewer = np.diff(starts)
        if (fewer < 0).any():
            where = int(np.argmax(fewer < 0))
            raise InputError(f"indptr falls after record {where}: it must never decrease.")
        if (fewer == 0).any():
            raise InputError(
                f"record {int(np.argmax(fewer == 0))} has no owner ({int((fewer == 0).sum())} such "
                "records): nobody would be protected for it. Name its owner, or leave it out."
            )
        if len(numbers) and int(numbers.min()) < 0:
            where = _record_at(starts, int(np.argmax(numbers < 0)))
            raise InputError(
                f"record {where} has a negative owner number: users are numbered from 0 to "
                f"n_users - 1 = {num_users - 1}."
            )
        if len(numbers) and int(numbers.max()) >= num_users:
            where = _record_at(starts, int(np.argmax(numbers >= num_users)))
            raise InputError(
                f"record {where} has an owner number past n_users - 1 = {num_users - 1}: "
                "raise n_users, or correct indices."
            )
        kind = np.int32 if num_users <= np.iinfo(np.int32).max else np.int64
        narrow = np.ascontiguousarray(numbers, dtype=kind)
        starts = np.ascontiguousarray(starts)
        last_seen = np.full(num_users, -1, dtype=np.int64)
        kept = _count_distinct(starts, narrow, last_seen)
        if kept < len(narrow):
            last_seen.fill(-1)
            distinct, ends = np.empty(kept, dtype=kind), np.zeros_like(starts)
            _copy_distinct(starts, narrow, last_seen, distinct, ends)
            starts, narrow = ends, distinct
        return Edges(indptr=starts, owners=narrow, num_users=num_users)

    @staticmethod
    def from_lists(records: Iterable[Iterable[int]], *, num_users: int) -> Edges:
        """The edges of a list of owner lists.

        >>> Edges.from_lists([[0, 1], [1]], num_users=2).degrees().tolist()
        [1, 2]
        """
        rows = [list(owners) for owners in records]
        indptr = indptr_of([len(row) for row in rows])
        flat = np.array([owner for row in rows for owner in row], dtype=np.int64)
        return Edges.of(indptr, flat, num_users=num_users)

    @staticmethod
    def load(path: Path) -> Edges:
        """The edges of an .npz file (`indptr`, `indices`, `n_users`) or of a store's directory."""
        if path.is_dir():
            return _of_store(UserStore.open(path))
        arrays = load_arrays(path, ("indptr", "indices", "n_users"))
        num_users = _scalar("n_users", arrays["n_users"])
        if num_users > max(MANY_USERS, MOST_IDLE * arrays["indices"].size):
            raise InputError(
                f"{path}: n_users = {num_users:,} for {arrays['indices'].size:,} owners of "
                "records: nearly nobody owns one, and counting them all takes gigabytes. Number "
                "only users who own a record."
            )
        return Edges.of(arrays["indptr"], arrays["indices"], num_users=num_users)


# Every user takes a counter, even one who owns nothing. This many counters fit into a gigabyte.
MANY_USERS = 2**27
MOST_IDLE = 8

# What numpy and zipfile raise for an archive that was damaged, or asks for more than there is.
_DAMAGE = (
    EOFError,
    MemoryError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


def load_arrays(path: Path, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """All arrays of an .npz file, which must have the named ones. No code in it is executed."""
    if not path.is_file():
        raise InputError(f"{path}: no such file or store.")
    try:
        # Opened here, because numpy leaves a file open that turns out to be no archive.
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise InputError(f"{path} holds a single array: expected an .npz archive.")
            missing = [name for name in names if name not in archive.files]
            if missing:
                raise InputError(
                    f"{path} has no array {', '.join(missing)}: expected {', '.join(names)}."
                )
            return {name: archive[name] for name in archive.files}
    except InputError:
        raise
    except _DAMAGE as error:
        raise InputError(f"{path} is not a readable .npz archive of plain arrays.") from error


def _of_store(store: UserStore) -> Edges:
    counted = store.manifest["records"]
    if counted != store.num_records:
        raise InputError(
            f"{store.path}: manifest.json counts {counted:,} records, record_users_indptr.npy "
            f"{store.num_records:,}. Import the data again."
        )
    return Edges.of(store.record_users_indptr, store.record_users, num_users=store.num_users)


def _integers(name: str, values: ArrayLike) -> NDArray[Any]:
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(
            f"{name} has type {array.dtype} and {array.ndim} dimensions: expected a flat array of "
            "integers."
        )
    return array


def _scalar(name: str, value: NDArray[Any]) -> int:
    if value.size != 1 or value.dtype.kind not in "iu":
        raise InputError(f"{name} must be one integer.")
    return int(value.reshape(()))


def _record_at(indptr: Ints, incidence: int) -> int:
    return int(np.searchsorted(indptr, incidence, side="right")) - 1


@compiled
def _count_distinct(indptr: Ints, owners: Owners, last_seen: Ints) -> int:
    kept = 0
    for record in range(len(indptr) - 1):
        for at in range(indptr[record], indptr[record + 1]):
            if last_seen[owners[at]] != record:
                last_seen[owners[at]] = record
                kept += 1
    return kept


@compiled
def _copy_distinct(
    indptr: Ints, owners: Owners, last_seen: Ints, distinct: Owners, ends: Ints
) -> None:
    kept = 0
    for record in range(len(indptr) - 1):
        for at in range(indptr[record], indptr[record + 1]):
            if last_seen[owners[at]] != record:
                last_seen[owners[at]] = record
                distinct[kept] = owners[at]
                kept += 1
        ends[record + 1] = kept


@compiled
def _add_contributions(indptr: Ints, owners: Owners, multiplicity: Ints, totals: Ints) -> None:
    for record in range(len(indptr) - 1):
        if multiplicity[record] > 0:
            for at in range(indptr[record], indptr[record + 1]):
                totals[owners[at]] += multiplicity[record]
