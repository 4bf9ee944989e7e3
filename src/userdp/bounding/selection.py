"""What contribution bounding hands to training: how often each record takes part.

A selection carries the digest of the edges it was made for, and the bound it keeps. Before training
on it, `check` counts every user's records again, so that nobody has to trust a file.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from userdp.bounding.edges import Edges, Ints, load_arrays
from userdp.bounding.names import USER_BY_USER
from userdp.errors import InputError
from userdp.files.durable import OWNER_ONLY_FILE

_ARRAYS = (
    "multiplicity",
    "max_records_per_user",
    "realised_bound",
    "method",
    "edges_digest",
    "guarantee",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """Record i takes part `multiplicity[i]` times; no user owns more than `realised_bound` of them.

    `max_records_per_user` is the bound k that was asked for. The realised bound may be smaller.
    Accounting may use it only under fixed-graph privacy, where the graph is public. `guarantee` is
    False for the paper's baselines that ignore the bound. Only min-separation sets `batches` (steps
    x batch size, record numbers) and `separation`.
    """

    multiplicity: Ints
    max_records_per_user: int
    realised_bound: int
    method: str
    edges_digest: str
    guarantee: bool = True
    batches: Ints | None = None
    separation: int | None = None

    def __repr__(self) -> str:
        return f"Selection(<confidential>, method={self.method!r})"

    @property
    def size(self) -> int:
        """The number of selected records, copies counted."""
        return int(self.multiplicity.sum())

    @property
    def distinct(self) -> int:
        """The number of different records selected."""
        return int(np.count_nonzero(self.multiplicity))

    def records(self) -> Ints:
        """The selected record numbers, each as often as it takes part: the rows to train on.

        Every copy is a separate row and is sampled separately. The bound counts copies.
        """
        return np.repeat(np.arange(len(self.multiplicity)), self.multiplicity)

    def sha256(self) -> str:
        """The sha256 of the multiplicities as little-endian int64."""
        return hashlib.sha256(self.multiplicity.astype("<i8").tobytes()).hexdigest()

    def order_sha256(self) -> str:
        """The sha256 of the batches and their shape as little-endian int64; empty without any."""
        if self.batches is None:
            return ""
        shape = np.asarray(self.batches.shape)
        parts = (shape.astype("<i8").tobytes(), self.batches.astype("<i8").tobytes())
        return hashlib.sha256(b"".join(parts)).hexdigest()

    @staticmethod
    def of(
        edges: Edges,
        multiplicity: Ints,
        max_records_per_user: int,
        *,
        method: str,
        guarantee: bool = True,
        batches: Ints | None = None,
        separation: int | None = None,
    ) -> Selection:
        """The selection of these multiplicities, after counting what each user contributes.

        Raises `InputError` if a guarantee is claimed and a user owns more than
        `max_records_per_user`.

        >>> edges = Edges.from_lists([[0, 1], [1]], num_users=2)
        >>> Selection.of(edges, np.array([1, 1]), 3, method="greedy").realised_bound
        2
        """
        realised = int(edges.contributions(multiplicity).max(initial=0))
        if guarantee and realised > max_records_per_user:
            raise InputError(
                f"a user owns {realised} selected records, more than max_records_per_user="
                f"{max_records_per_user}: the accounting would not cover that user. Raise the "
                "bound, or bound the contributions again."
            )
        return Selection(
            multiplicity=multiplicity,
            max_records_per_user=max_records_per_user,
            realised_bound=realised,
            method=method,
            edges_digest=edges.digest(),
            guarantee=guarantee,
            batches=batches,
            separation=separation,
        )

    def check(self, edges: Edges) -> None:
        """Raise unless the selection was made for these edges and keeps its bound on them."""
        if self.edges_digest != edges.digest() or len(self.multiplicity) != edges.num_records:
            raise InputError(
                "the selection was made for other edges: owners or records have changed since. "
                "Bound the contributions again."
            )
        if not self.guarantee:
            raise InputError(
                f"method {self.method!r} ignores the bound and gives no guarantee: it can be "
                "compared with, not trained on privately. Use a method that bounds."
            )
        realised = int(edges.contributions(self.multiplicity).max(initial=0))
        if realised != self.realised_bound or realised > self.max_records_per_user:
            raise InputError(
                f"the selection claims at most {self.realised_bound} records a user, but a user "
                f"owns {realised}: it was edited. Bound the contributions again."
            )

    def participants(self, edges: Edges, steps: int) -> tuple[Ints, Ints]:
        """Who takes part in which of the first `steps` batches: users, and as many step numbers.

        Every owner of every record is counted from the edges, so nobody has to trust the file.
        """
        batches = self.batches
        if batches is None or self.separation is None:
            raise InputError(
                f"the selection by {self.method!r} has no batches in an order: bound again with "
                "`userdp bound --method min-separation`."
            )
        if batches.ndim != 2 or not np.issubdtype(batches.dtype, np.integer):
            raise InputError("the selection's batches are malformed: bound again.")
        if len(batches) < steps:
            raise InputError(
                f"the selection has {len(batches):,} batches, and {steps:,} steps are planned: "
                "bound again with as many steps."
            )
        used = batches[:steps].astype(np.int64)
        records = used.reshape(-1)
        if len(records) and not (records.min() >= 0 and records.max() < edges.num_records):
            raise InputError(
                "the selection's batches hold records that are not there: bound again."
            )
        count = np.diff(edges.indptr)[records]
        step = np.repeat(np.arange(steps), used.shape[1])
        ends = np.cumsum(count)
        place = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - count, count)
        users = edges.owners[np.repeat(edges.indptr[records], count) + place]
        return np.asarray(users, dtype=np.int64), np.repeat(step, count)

    def check_user_by_user(self, edges: Edges) -> None:
        """Raise if one user could change which records of others are selected.

        Nobody can if every record has one owner and the method chose for each user alone. Call this
        where it is private who owns which record, and call `check` as well.
        """
        if (edges.cardinality() > 1).any():
            raise InputError(
                "records have several owners, so that one user changes which records of others are "
                "selected: only a fixed-graph adjacency, such as 'fixed-graph-zero-out' with unit "
                "= 'record', covers that. It treats who owns which record as public."
            )
        if self.method not in USER_BY_USER:
            raise InputError(
                f"method {self.method!r} may let one user change which records of others are "
                "selected: only a fixed-graph adjacency covers that. Otherwise select by one of "
                f"{', '.join(sorted(USER_BY_USER))}."
            )

    def save(self, path: Path) -> None:
        """Write the selection as .npz. A half-written file never replaces a whole one."""
        arrays: dict[str, Any] = {name: np.asarray(getattr(self, name)) for name in _ARRAYS}
        if self.batches is not None:
            arrays |= {"batches": self.batches, "separation": np.asarray(self.separation)}
        partial = path.with_name(path.name + ".partial")
        try:
            partial.unlink(missing_ok=True)
            # Which records are kept says who has how many, so only the owner may read it.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(os.open(partial, flags, OWNER_ONLY_FILE), "wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise InputError(f"{path} cannot be written: {error.strerror}.") from error

    @staticmethod
    def load(path: Path) -> Selection:
        """The selection that `save` wrote. Call `check` with the edges before using it."""
        arrays = load_arrays(path, _ARRAYS)
        multiplicity = arrays["multiplicity"]
        if multiplicity.ndim != 1 or multiplicity.dtype != np.int64 or (multiplicity < 0).any():
            raise InputError(f"{path}: multiplicity must be a flat int64 array of counts.")
        try:
            return Selection(
                multiplicity=multiplicity,
                max_records_per_user=int(arrays["max_records_per_user"]),
                realised_bound=int(arrays["realised_bound"]),
                method=str(arrays["method"]),
                edges_digest=str(arrays["edges_digest"]),
                guarantee=bool(arrays["guarantee"]),
                batches=arrays.get("batches"),
                separation=int(arrays["separation"]) if "separation" in arrays else None,
            )
        except (OverflowError, TypeError, ValueError) as error:
            raise InputError(f"{path} is not a selection: its entries are malformed.") from error
