"""Greedy contribution bounding: Algorithms 2 and 3 of Ganesh et al. 2025 (App. B.2).

Records are visited by increasing number of owners, ties in input order. A record is taken if all
its owners still have room. The choice depends on the edges alone, so it costs nothing under
fixed-graph privacy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from userdp.bounding.edges import Edges, Ints, Owners
from userdp.compiled import compiled
from userdp.errors import InputError

Order = NDArray[np.signedinteger[Any]]
Room = NDArray[np.integer[Any]]

# No accountant has any use for larger groups, and making copies would take for ever.
LARGEST_BOUND = 1_000_000


def greedy(edges: Edges, max_records_per_user: int) -> Ints:
    """Take each record at most once, if none of its owners has k records already.

    k = `max_records_per_user`. Returns the multiplicity (0 or 1) of each record, in input order.

    Guarantee: no user owns more than k selected records, and no further record could be added.
    Reference: Ganesh et al. 2025, Alg. 2.

    >>> greedy(Edges.from_lists([[0, 1], [0], [1, 2], [2]], num_users=3), 1).tolist()
    [0, 1, 0, 1]
    """
    return greedy_in_order(edges, by_cardinality(edges), max_records_per_user)


def greedy_duplicates(edges: Edges, max_records_per_user: int) -> Ints:
    """Go over the records again and again, and take further copies while all owners have room.

    Returns the multiplicity of each record. It is positive for the records that `greedy` selects,
    because the first pass is Algorithm 2.

    Guarantee: no user owns more than k selected records, copies counted, and no copy could be
    added.
    Reference: Ganesh et al. 2025, Alg. 3.

    >>> greedy_duplicates(Edges.from_lists([[0], [0, 1], [1, 2]], num_users=3), 3).tolist()
    [2, 1, 2]
    """
    nothing = np.zeros(edges.num_records, dtype=np.int64)
    return fill_up_duplicates(edges, nothing, max_records_per_user)


def greedy_in_order(edges: Edges, order: Order, max_records_per_user: int) -> Ints:
    """Algorithm 2 over the records in the given order, which must not depend on any text.

    Guarantee: no user owns more than k selected records, whatever the order.

    >>> edges = Edges.from_lists([[0], [0, 1], [1]], num_users=2)
    >>> greedy_in_order(edges, np.array([1, 0, 2]), 1).tolist()
    [0, 1, 0]
    """
    room = full_room(edges.num_users, max_records_per_user)
    multiplicity = np.zeros(edges.num_records, dtype=np.int64)
    take_in_order(edges.indptr, edges.owners, order, room, multiplicity)
    return multiplicity


def fill_up(edges: Edges, order: Order, selected: Ints, max_records_per_user: int) -> Ints:
    """Add to a bounded selection by Algorithm 2 over the records of `order`."""
    room = full_room(edges.num_users, max_records_per_user)
    room -= edges.contributions(selected).astype(room.dtype)
    multiplicity = selected.copy()
    take_in_order(edges.indptr, edges.owners, order, room, multiplicity)
    return multiplicity


def fill_up_duplicates(edges: Edges, selected: Ints, max_records_per_user: int) -> Ints:
    """Add to a bounded selection by Algorithm 3."""
    room = full_room(edges.num_users, max_records_per_user)
    room -= edges.contributions(selected).astype(room.dtype)
    multiplicity = selected.copy()
    _repeat_passes(edges.indptr, edges.owners, by_cardinality(edges), room, multiplicity)
    return multiplicity


def greedy_random_order(
    edges: Edges, max_records_per_user: int, *, rng: np.random.Generator
) -> Ints:
    """Algorithm 2 over the records in a uniformly random order: still bounded, less biased.

    >>> edges = Edges.from_lists([[0], [0, 1], [1]], num_users=2)
    >>> int(edges.contributions(greedy_random_order(edges, 1, rng=np.random.default_rng(0))).max())
    1
    """
    return greedy_in_order(edges, rng.permutation(edges.num_records), max_records_per_user)


def greedy_weighted(edges: Edges, weights: ArrayLike, max_records_per_user: int) -> Ints:
    """Algorithm 2 over the records by decreasing weight per owner, ties in input order.

    A record's weight must be public, such as its number of owners. With equal weights this is
    `greedy`. If the weight is the number of owners, all records have the same weight per owner, and
    the input order alone decides.

    Guarantee: no user owns more than k selected records.

    >>> edges = Edges.from_lists([[0], [0, 1], [1]], num_users=2)
    >>> greedy_weighted(edges, [1, 5, 1], 1).tolist()
    [0, 1, 0]
    """
    order = by_weight_per_owner(edges, check_weights(edges, weights))
    return greedy_in_order(edges, order, max_records_per_user)


def by_weight_per_owner(edges: Edges, weights: Ints) -> Order:
    """The records by decreasing weight per owner, ties in input order."""
    return np.argsort(-(weights / edges.cardinality()), kind="stable")


def by_cardinality(edges: Edges) -> Order:
    """The records by increasing number of owners, ties in input order (Alg. 2, line 1).

    >>> by_cardinality(Edges.from_lists([[0, 1], [1], [0]], num_users=2)).tolist()
    [1, 2, 0]
    """
    kind = np.int32 if edges.num_records <= np.iinfo(np.int32).max else np.int64
    order = np.empty(edges.num_records, dtype=kind)
    _counting_sort(edges.indptr, order)
    return order


def full_room(num_users: int, max_records_per_user: int) -> Room:
    """k free places for every user, in the narrowest type that holds k.

    Each incidence reads a counter at a random place. With one byte each, millions fit the cache.
    """
    check_bound(max_records_per_user)
    kind = np.uint8 if max_records_per_user <= np.iinfo(np.uint8).max else np.int64
    return np.full(num_users, max_records_per_user, dtype=kind)


def check_bound(max_records_per_user: int) -> None:
    """Refuse a bound that would select nothing, or that bounds nobody."""
    if max_records_per_user < 1:
        raise InputError(
            f"max_records_per_user={max_records_per_user} would select nothing. Use 1 or more."
        )
    if max_records_per_user > LARGEST_BOUND:
        raise InputError(
            f"max_records_per_user={max_records_per_user} protects nobody at any epsilon of use: "
            f"give at most {LARGEST_BOUND:,}."
        )


def check_weights(edges: Edges, weights: ArrayLike) -> Ints:
    """Return the weights as an array, checked: one positive whole number for each record."""
    array = np.asarray(weights)
    if array.shape != (edges.num_records,) or array.dtype.kind not in "iu":
        raise InputError(
            f"weights have shape {array.shape} and type {array.dtype}: expected one integer for "
            f"each of {edges.num_records:,} records."
        )
    if len(array) and (int(array.min()) < 1 or int(array.max()) > 1_000_000):
        raise InputError("weights must lie between 1 and 1,000,000: leave out a worthless record.")
    return array.astype(np.int64)


@compiled
def _counting_sort(indptr: Ints, order: Order) -> None:
    records = len(indptr) - 1
    widest = 0
    for record in range(records):
        widest = max(widest, indptr[record + 1] - indptr[record])
    place = np.zeros(widest + 2, dtype=np.int64)
    for record in range(records):
        place[indptr[record + 1] - indptr[record] + 1] += 1
    for size in range(1, widest + 2):
        place[size] += place[size - 1]
    for record in range(records):
        size = indptr[record + 1] - indptr[record]
        order[place[size]] = record
        place[size] += 1


@compiled
def take_in_order(
    indptr: Ints, owners: Owners, order: Order, room: Room, multiplicity: Ints
) -> None:
    """One pass of Algorithm 2 (lines 3 to 7): updates `room` and `multiplicity` in place."""
    for record in order:
        fits = True
        for at in range(indptr[record], indptr[record + 1]):
            if room[owners[at]] == 0:
                fits = False
                break
        if fits:
            for at in range(indptr[record], indptr[record + 1]):
                room[owners[at]] -= 1
            multiplicity[record] += 1


@compiled
def _repeat_passes(
    indptr: Ints, owners: Owners, order: Order, room: Room, multiplicity: Ints
) -> None:
    # Room never grows, so a record refused once is always refused. Each pass visits only the
    # records that the last pass took, and a pass that takes none is the last (Alg. 3, line 7).
    live = len(order)
    while live > 0:
        taken = 0
        for position in range(live):
            record = order[position]
            fits = True
            for at in range(indptr[record], indptr[record + 1]):
                if room[owners[at]] == 0:
                    fits = False
                    break
            if fits:
                for at in range(indptr[record], indptr[record + 1]):
                    room[owners[at]] -= 1
                multiplicity[record] += 1
                order[taken] = record
                taken += 1
        live = taken
