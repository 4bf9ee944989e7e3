"""Exact reductions of the contribution-bounding integer program, before any solver sees it.

The program is max sum_i w_i x_i subject to sum_{i: j in e_i} x_i <= c_j for every user j, x_i in
{0, 1}, with c_j = k at first and w_i = 1 unless weights are given (Ganesh et al. 2025, App. C.4,
Eq. 1). Four rules are applied until none changes anything. Each keeps at least one optimal
selection:

R1. A user with no more undecided records than free places never refuses any. Forget this user.
R2. A record whose owners are all forgotten is taken: it is worth something and costs nobody.
R3. Of the records with a single remaining owner j, only the c_j best can be worth taking. Such a
    record is taken if no other record of j is worth more. (Suppose an optimal selection leaves it
    out. Then j is full and has a record that is worth no more: swap the two.)
R4. A user without free places refuses all its undecided records.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from userdp.bounding.edges import Edges, Ints

Flags = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class Residual:
    """What the reductions leave: undecided incidences, free places, and the records taken so far.

    Incidence i joins `record[i]` to `user[i]`, one of its owners that is not forgotten. Incidences
    are sorted by record.
    """

    record: Ints
    user: Ints
    free: Ints
    taken: Flags
    rounds: int


def reduce(edges: Edges, max_records_per_user: int, weights: Ints) -> Residual:
    """Decide every record that R1 to R4 can decide.

    >>> edges = Edges.from_lists([[0], [0, 1], [1, 2]], num_users=3)
    >>> residual = reduce(edges, 1, np.ones(3, dtype=np.int64))
    >>> residual.taken.tolist(), len(residual.record)
    ([True, False, True], 0)
    """
    record = edges.record_of_incidence()
    user = edges.owners.astype(np.int64)
    free = np.full(edges.num_users, max_records_per_user, dtype=np.int64)
    open_ = np.ones(edges.num_records, dtype=np.bool_)
    taken = np.zeros(edges.num_records, dtype=np.bool_)

    rounds = 0
    while True:
        rounds += 1
        before = len(record), int(open_.sum())

        binds = np.bincount(user, minlength=edges.num_users) > free  # R1
        keep = binds[user]
        record, user = record[keep], user[keep]

        owners_left = np.bincount(record, minlength=edges.num_records)
        unowned = open_ & (owners_left == 0)  # R2
        taken |= unowned
        open_ &= ~unowned

        single = np.flatnonzero(owners_left[record] == 1)  # R3
        if len(single):
            take, refuse = _decide_singles(record, user, free, weights, single)
            taken[record[take]] = True
            open_[record[take]] = False
            open_[record[refuse]] = False
            free -= np.bincount(user[take], minlength=edges.num_users)

        open_[record[free[user] == 0]] = False  # R4
        keep = open_[record]
        record, user = record[keep], user[keep]
        if (len(record), int(open_.sum())) == before:
            break
    return Residual(record=record, user=user, free=free, taken=taken, rounds=rounds)


def _decide_singles(
    record: Ints, user: Ints, free: Ints, weights: Ints, single: Ints
) -> tuple[Ints, Ints]:
    """Apply R3: which incidences of single-owner records to take, and which to refuse."""
    owner, weight = user[single], weights[record[single]]
    best_first = np.lexsort((record[single], -weight, owner))
    single, owner, weight = single[best_first], owner[best_first], weight[best_first]
    first_of_owner = np.flatnonzero(np.r_[True, owner[1:] != owner[:-1]])
    sizes = np.diff(np.r_[first_of_owner, len(owner)])
    rank = np.arange(len(owner)) - np.repeat(first_of_owner, sizes)

    shared = np.ones(len(record), dtype=np.bool_)
    shared[single] = False
    best_shared = np.zeros(len(free), dtype=np.int64)
    np.maximum.at(best_shared, user[shared], weights[record[shared]])

    fits = rank < free[owner]
    return single[fits & (weight >= best_shared[owner])], single[~fits]


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """Records with the same remaining owners (and weight), merged into one integer variable.

    Members of group g are `members[starts[g]:starts[g + 1]]` in input order; its owners are
    `owners[indptr[g]:indptr[g + 1]]`, sorted.
    """

    starts: Ints
    members: Ints
    indptr: Ints
    owners: Ints

    @property
    def sizes(self) -> Ints:
        """The number of records in each group."""
        return np.diff(self.starts)


def merge_identical(record: Ints, user: Ints, weights: Ints) -> Groups:
    """Group the records of sorted incidences by their set of users and their weight.

    >>> groups = merge_identical(
    ...     np.array([0, 0, 1, 2, 2]), np.array([1, 0, 1, 0, 1]), np.ones(3, dtype=np.int64)
    ... )
    >>> groups.members.tolist(), groups.sizes.tolist(), groups.owners.tolist()
    ([1, 0, 2], [1, 2], [1, 0, 1])
    """
    within = np.lexsort((user, record))
    record, user = record[within], user[within]
    first = np.flatnonzero(np.r_[True, record[1:] != record[:-1]]) if len(record) else record
    width = np.diff(np.r_[first, len(record)])
    members: list[Ints] = []
    sizes: list[Ints] = []
    owners: list[Ints] = []
    widths: list[Ints] = []
    for size in np.unique(width):
        rows = first[width == size]
        table = np.column_stack(
            [weights[record[rows]], *(user[rows + column] for column in range(size))]
        )
        distinct, group = np.unique(table, axis=0, return_inverse=True)
        group = group.reshape(-1)
        members.append(record[rows][np.argsort(group, kind="stable")])
        sizes.append(np.bincount(group, minlength=len(distinct)))
        owners.append(distinct[:, 1:].reshape(-1))
        widths.append(np.full(len(distinct), size, dtype=np.int64))
    empty = np.empty(0, dtype=np.int64)
    return Groups(
        starts=np.r_[0, np.cumsum(np.concatenate([empty, *sizes]))].astype(np.int64),
        members=np.concatenate([empty, *members]),
        indptr=np.r_[0, np.cumsum(np.concatenate([empty, *widths]))].astype(np.int64),
        owners=np.concatenate([empty, *owners]),
    )
