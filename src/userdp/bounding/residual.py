"""The end of bounding in rounds: what is still undecided, fetched and decided by one pass.

Why that gives the result of Algorithm 2 is said at the top of `rounds.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from userdp.bounding.compiled import compiled
from userdp.bounding.edges import Ints, Owners
from userdp.bounding.engines import Database
from userdp.bounding.greedy import Order, Room, full_room, take_in_order


def refuse_rest(
    database: Database, left: Any, places: Any | None, max_records_per_user: int
) -> Ints:
    """The priorities that the sequential pass refuses among what is still undecided.

    A user has as many places as the column `free` says, or `spare` more than records that are left
    (fewer, if negative): the column `spare`, or the table `places`, which has room for the others.
    """
    columns = dict(zip(left.columns, database.fetch(left), strict=True))
    place, priorities = _small_numbers(columns["priority"])
    user = columns["user"]
    number, _ = _small_numbers(user)
    room = full_room(int(number.max(initial=-1)) + 1, max_records_per_user)
    if "free" in columns:
        _set_room(number, columns["free"], room)
    elif "spare" in columns:
        _set_room_by_length(number, columns["spare"], room, max_records_per_user)
    else:
        assert places is not None
        known, spare = database.fetch(places)
        spare_of_user = np.zeros(int(max(user.max(initial=0), known.max(initial=0))) + 1, np.int32)
        spare_of_user[known] = spare
        _set_room_by_length(number, spare_of_user[user], room, max_records_per_user)
    indptr = np.zeros(int(place.max(initial=-1)) + 2, dtype=np.int64)
    owners = np.empty_like(number)
    _group(place, number, indptr, owners)
    # A place that no record has counts as taken: a record of nobody always fits.
    taken = np.zeros(len(indptr) - 1, dtype=np.int64)
    take_in_order(indptr, owners, np.arange(len(taken)), room, taken)
    refused = np.flatnonzero(taken == 0)
    return refused if priorities is None else priorities[refused].astype(np.int64)


@compiled
def _group(place: Order, number: Owners, indptr: Ints, owners: Owners) -> None:
    """Write the owners of each place side by side, those of place i from `indptr[i]` on."""
    for at in range(len(place)):
        indptr[place[at] + 1] += 1
    for following in range(1, len(indptr)):
        indptr[following] += indptr[following - 1]
    # Each start moves to its end, which is the next one's start: shifted back below.
    for at in range(len(place)):
        owners[indptr[place[at]]] = number[at]
        indptr[place[at]] += 1
    for following in range(len(indptr) - 1, 0, -1):
        indptr[following] = indptr[following - 1]
    indptr[0] = 0


@compiled
def _set_room(number: Owners, free: Order, room: Room) -> None:
    for at in range(len(number)):
        room[number[at]] = free[at]


@compiled
def _set_room_by_length(number: Owners, spare: Order, room: Room, most: int) -> None:
    length = np.zeros(len(room), dtype=np.int32)
    for at in range(len(number)):
        length[number[at]] += 1
    for at in range(len(number)):
        # A user whose line fits may have room for more than `room` can count: the bound will do.
        room[number[at]] = min(spare[at] + length[number[at]], most)


def _small_numbers(values: Order) -> tuple[Order, Order | None]:
    """Numbers from zero in the values' order, and the value of each number.

    None: the values themselves, if they are small enough for an array by them to be small.
    """
    if len(values) == 0 or (values.min() >= 0 and values.max() < 4 * len(values)):
        return values, None
    names, numbers = np.unique(values, return_inverse=True)
    return numbers.reshape(-1), names
