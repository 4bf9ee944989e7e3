"""Which groups of a cohort each rank takes: whole groups, so that a user is clipped once.

Every rank computes all shares from numbers that every rank has: the cohort and the lengths of its
rows. So nobody is told what to do, and no group is taken twice or left out. Needs no torch.

Secret, like the cohort. Which rank computes an update changes how sums are rounded, and nothing
else.
"""

from __future__ import annotations

import hashlib
import heapq

import numpy as np
from numpy.typing import NDArray

from userdp.index import Rows
from userdp.sampling.cohort import Cohort


def shares(costs: NDArray[np.int64], count: int) -> list[Rows]:
    """The places of the groups that each of `count` ranks takes, in the cohort's order.

    The groups are dealt out by falling cost, each to the rank that has the least so far. So the
    largest share is at most 4/3 of the best possible (Graham 1969).

    >>> [share.tolist() for share in shares(np.array([5, 1, 4, 2]), 2)]
    [[0, 1], [2, 3]]
    """
    taken: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, rank) for rank in range(count)]
    for place in np.argsort(-costs, kind="stable").tolist():
        load, rank = heapq.heappop(loads)
        taken[rank].append(place)
        # A group without a record costs a little, too: nobody gets all of them.
        heapq.heappush(loads, (load + max(1, int(costs[place])), rank))
    return [np.array(sorted(places), dtype=np.int64) for places in taken]


def costs_of(cohort: Cohort, row_lengths: Rows | None) -> NDArray[np.int64]:
    """How much work each group is: its tokens, or its rows where nobody knows their length."""
    sizes = np.diff(cohort.indptr)
    if row_lengths is None:
        return sizes.astype(np.int64)
    summed = np.concatenate([[0], np.cumsum(row_lengths[cohort.rows], dtype=np.int64)])
    return summed[cohort.indptr[1:]] - summed[cohort.indptr[:-1]]


def places_of(cohort: Cohort, rank: int, count: int, row_lengths: Rows | None = None) -> Rows:
    """Which groups of the cohort one rank takes, in the cohort's order."""
    if count == 1:
        return np.arange(len(cohort))
    return shares(costs_of(cohort, row_lengths), count)[rank]


def dealt_by(cohort: Cohort, row_lengths: Rows | None = None) -> int:
    """A number of 48 bits that names what the shares are computed from. Secret.

    A rank with another number shares out another cohort, or by other costs. A user could then be on
    two ranks, and move the sum by two clip norms.

    >>> cohort = Cohort.of([np.array([0, 1]), np.array([2])])
    >>> dealt_by(cohort) == dealt_by(cohort, np.array([9, 1, 1]))
    False
    """
    found = hashlib.sha256()
    for numbers in (cohort.indptr, cohort.rows, costs_of(cohort, row_lengths)):
        found.update(len(numbers).to_bytes(8, "big"))
        found.update(np.asarray(numbers, "<i8").tobytes())
    return int.from_bytes(found.digest()[:6], "big")


def taken(cohort: Cohort, places: Rows) -> Cohort:
    """The groups of the cohort at these places."""
    if len(places) == len(cohort):
        return cohort
    groups = list(cohort)
    return Cohort.of([groups[place] for place in places.tolist()])
