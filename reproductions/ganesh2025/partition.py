"""A partition of the users into groups, for cyclic Poisson sampling with banded noise.

Users are split into b groups; step t samples from the records owned only by users of group t mod b,
so a user takes part at most once in b steps and the sampling still amplifies. The price with
several owners: a record whose owners fall into different groups is discarded. Finding the partition
that discards least generalises the NP-hard k-cut problem; here is a heuristic, and the count it
costs.

Reference: Ganesh et al. 2025, App. A.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from userdp.bounding.edges import Edges, Ints, Owners
from userdp.bounding.greedy import Order, by_cardinality
from userdp.compiled import compiled
from userdp.errors import InputError


@dataclass(frozen=True, kw_only=True, eq=False)
class CyclicGroups:
    """User j is in group `group_of_user[j]`, record i in `group_of_record[i]` or discarded: -1."""

    num_groups: int
    group_of_user: Ints
    group_of_record: Ints

    def __repr__(self) -> str:
        return f"CyclicGroups(<confidential>, num_groups={self.num_groups})"

    @property
    def discarded(self) -> int:
        """The number of records that no step can sample."""
        return int(np.count_nonzero(self.group_of_record < 0))

    @property
    def sizes(self) -> Ints:
        """The number of records of each group."""
        kept = self.group_of_record[self.group_of_record >= 0]
        return np.bincount(kept, minlength=self.num_groups)


def cyclic_groups(edges: Edges, group_of_user: Ints, *, num_groups: int) -> CyclicGroups:
    """Give each record to the group that all its owners are in, or to none.

    Guarantee: every kept record has all its owners in its own group.

    >>> edges = Edges.from_lists([[0, 1], [1, 2], [2]], num_users=3)
    >>> cyclic_groups(edges, np.array([0, 0, 1]), num_groups=2).group_of_record.tolist()
    [0, -1, 1]
    """
    group_of_user = np.asarray(group_of_user, dtype=np.int64)
    if group_of_user.shape != (edges.num_users,):
        raise InputError(
            f"the partition covers {len(group_of_user):,} users of {edges.num_users:,}: name a "
            "group for each."
        )
    if int(group_of_user.min()) < 0 or int(group_of_user.max()) >= num_groups:
        raise InputError(f"groups are numbered from 0 to num_groups - 1 = {num_groups - 1}.")
    group_of_record = np.empty(edges.num_records, dtype=np.int64)
    _common_group(edges.indptr, edges.owners, group_of_user, group_of_record)
    return CyclicGroups(
        num_groups=num_groups, group_of_user=group_of_user, group_of_record=group_of_record
    )


def partition_users(edges: Edges, *, num_groups: int) -> CyclicGroups:
    """Split the users into b groups that keep many records whole: a heuristic, no optimum.

    Records are visited by number of owners; the owners of one are joined while their cluster holds
    at most 1/b of all users. Clusters then go, the one with most records first, to the group with
    fewest records so far that has room for them. Nothing but the edges is looked at.

    >>> edges = Edges.from_lists([[0, 1], [2, 3], [0, 1], [1, 2]], num_users=4)
    >>> partition_users(edges, num_groups=2).discarded
    1
    """
    if not 1 <= num_groups <= edges.num_users:
        raise InputError(
            f"num_groups={num_groups} of {edges.num_users:,} users: use 1 to {edges.num_users:,}."
        )
    largest = -(-edges.num_users // num_groups)
    parent = np.arange(edges.num_users)
    weight = np.ones(edges.num_users, dtype=np.int64)
    _join(edges.indptr, edges.owners, by_cardinality(edges), parent, weight, largest)
    root = _roots(parent)
    inside = cyclic_groups(edges, root, num_groups=edges.num_users).group_of_record
    records = np.bincount(inside[inside >= 0], minlength=edges.num_users)
    clusters = np.flatnonzero(root == np.arange(edges.num_users))
    clusters = clusters[np.lexsort((clusters, -weight[clusters], -records[clusters]))]
    group_of_cluster = np.zeros(edges.num_users, dtype=np.int64)
    _pack(clusters, weight, records, group_of_cluster, num_groups, largest)
    return cyclic_groups(edges, group_of_cluster[root], num_groups=num_groups)


@compiled
def _common_group(indptr: Ints, owners: Owners, group_of_user: Ints, group_of_record: Ints) -> None:
    for record in range(len(indptr) - 1):
        group = group_of_user[owners[indptr[record]]]
        for at in range(indptr[record] + 1, indptr[record + 1]):
            if group_of_user[owners[at]] != group:
                group = -1
                break
        group_of_record[record] = group


@compiled
def _find(parent: Ints, user: int) -> int:
    while parent[user] != user:
        parent[user] = parent[parent[user]]
        user = parent[user]
    return user


@compiled
def _join(
    indptr: Ints, owners: Owners, order: Order, parent: Ints, weight: Ints, largest: int
) -> None:
    for record in order:
        # The clusters of the owners, each once: all of them are joined, or none.
        total = 0
        for at in range(indptr[record], indptr[record + 1]):
            root = _find(parent, int(owners[at]))
            seen = False
            for before in range(indptr[record], at):
                if _find(parent, int(owners[before])) == root:
                    seen = True
                    break
            if not seen:
                total += weight[root]
                if total > largest:
                    break
        if total <= largest:
            first = _find(parent, int(owners[indptr[record]]))
            for at in range(indptr[record] + 1, indptr[record + 1]):
                root = _find(parent, int(owners[at]))
                if root != first:
                    parent[root] = first
                    weight[first] += weight[root]


@compiled
def _roots(parent: Ints) -> Ints:
    roots = np.empty_like(parent)
    for user in range(len(parent)):
        roots[user] = _find(parent, user)
    return roots


@compiled
def _pack(
    clusters: Ints,
    weight: Ints,
    records: Ints,
    group_of_cluster: Ints,
    num_groups: int,
    largest: int,
) -> None:
    users_in = np.zeros(num_groups, dtype=np.int64)
    records_in = np.zeros(num_groups, dtype=np.int64)
    for cluster in clusters:
        best = -1
        for group in range(num_groups):
            fits = users_in[group] + weight[cluster] <= largest
            if fits and (best < 0 or records_in[group] < records_in[best]):
                best = group
        if best < 0:
            # No group has room for the whole cluster: the emptiest one takes it all the same.
            best = np.argmin(users_in)
        group_of_cluster[cluster] = best
        users_in[best] += weight[cluster]
        records_in[best] += records[cluster]
