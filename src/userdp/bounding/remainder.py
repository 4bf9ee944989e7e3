"""The end of bounding in rounds: one sequential pass decides what is still undecided.

The top of `rounds.py` says why this gives the result of Algorithm 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from userdp.bounding.edges import Ints, Owners
from userdp.bounding.greedy import Order, Room, full_room, take_in_order
from userdp.compiled import compiled
from userdp.data.engine import Engine


def refuse_rest(engine: Engine, left: Any, places: Any | None, max_records_per_user: int) -> Ints:
    """The priorities that the sequential pass refuses among the undecided records in `left`.

    A user's free places come from one of three sources. The column `free` gives them. The column
    `spare` gives them less the user's undecided records, and may be negative. The table `places`
    gives `spare` for some users; the others have room for all their records.
    """
    columns = arrays_of(engine.fetch(left))
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
        given = arrays_of(engine.fetch(places))
        known, spare = given["user"], given["spare"]
        spare_of_user = np.zeros(int(max(user.max(initial=0), known.max(initial=0))) + 1, np.int32)
        spare_of_user[known] = spare
        _set_room_by_length(number, spare_of_user[user], room, max_records_per_user)
    indptr = np.zeros(int(place.max(initial=-1)) + 2, dtype=np.int64)
    owners = np.empty_like(number)
    _group(place, number, indptr, owners)
    # A place without a record counts as taken, because a record without owners always fits.
    taken = np.zeros(len(indptr) - 1, dtype=np.int64)
    take_in_order(indptr, owners, np.arange(len(taken)), room, taken)
    refused = np.flatnonzero(taken == 0)
    return refused if priorities is None else priorities[refused].astype(np.int64)


def arrays_of(rows: pa.Table) -> dict[str, Order]:
    """The columns of a table of whole numbers, by name."""
    return {name: np.ascontiguousarray(rows.column(name)) for name in rows.column_names}


@compiled
def _group(place: Order, number: Owners, indptr: Ints, owners: Owners) -> None:
    """Write the owners of each place side by side, those of place i from `indptr[i]` on."""
    for at in range(len(place)):
        indptr[place[at] + 1] += 1
    for following in range(1, len(indptr)):
        indptr[following] += indptr[following - 1]
    # This moves each start to the next one's start. The loop after it shifts them back.
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
        # A user may have more room than `room` can count. The bound is enough then.
        room[number[at]] = min(spare[at] + length[number[at]], most)


def _small_numbers(values: Order) -> tuple[Order, Order | None]:
    """Numbers from zero in the values' order, and the value of each number.

    Values that are small enough to index an array keep their own numbers: the second is then None.
    """
    if len(values) == 0 or (values.min() >= 0 and values.max() < 4 * len(values)):
        return values, None
    names, numbers = np.unique(values, return_inverse=True)
    return numbers.reshape(-1), names
