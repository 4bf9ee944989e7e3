"""The queries of bounding in rounds, as Ibis expressions. `rounds.py` says why they are right.

A round is a fixed list of tables that are made one after the other. The expressions are written
once and run on DuckDB (out of core) and Spark.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import ibis

from userdp.bounding.edges import Ints

# `with_priority`: the number of owners, then the record number; 2^22 owners, 2^40 records at most.
_RECORD_BITS = 40


def with_priority(owners: Any) -> Any:
    """Every incidence (`record`, `user`, each pair once) with its record's place in greedy order.

    This is for tables of any size that the engine reads by itself; it takes one exchange by record.
    The priorities have gaps, so there is no sketch and every round lines up.
    """
    cardinality = owners.count().over(ibis.window(group_by="record"))
    priority = cardinality.cast("int64") * (1 << _RECORD_BITS) + owners.record.cast("int64")
    return owners.select(priority=priority, user=owners.user)


def records_of(priority: Ints) -> Ints:
    """The record numbers of priorities of `with_priority`.

    >>> import numpy as np
    >>> records_of(np.array([(2 << 40) | 7])).tolist()
    [7]
    """
    return priority & ((1 << _RECORD_BITS) - 1)


@ibis.udf.agg.builtin
def bit_or(bits: int) -> int:  # pyright: ignore[reportReturnType]
    """The bits set in any row. All engines have it, but Ibis translates it for some only."""


@ibis.udf.scalar.builtin
def bit_count(bits: int) -> int:  # pyright: ignore[reportReturnType]
    """The number of bits set."""


class Query(NamedTuple):
    """A table to make; `Engine.hold` explains `filter_last`."""

    name: str
    rows: Any
    filter_last: bool = False


@lru_cache(maxsize=64)
def queries_of_round(
    name: str,
    columns: tuple[tuple[str, Any], ...],
    free: int | None,
    turn: int,
    ranges: tuple[tuple[int, int], ...],
) -> tuple[tuple[Query, ...], tuple[Query, ...]]:
    """The tables of one round in the order they are made: first to take records, then to refuse.

    The last table of the first part holds the records that were not taken. A user has `spare` more
    places than such records (fewer, if negative); this is a column of the table, or of the sketch.
    The last two tables of the second part hold the refused records, and those that still wait with
    their users' `free` places. In the first round all users have `free` places; later it is a
    column.
    """
    steps: list[Query] = []

    def add(step: str, rows: Any, *, filter_last: bool = False) -> Any:
        steps.append(Query(f"userdp_round_{step}", rows, filter_last))
        return ibis.table(rows.schema(), name=steps[-1].name)

    waiting = ibis.table(dict(columns), name=name)
    if "bit" in waiting.columns:
        assert free is not None
        sketch = add("sketch", _sketch(waiting, free))
        late = add("late", _late_by_sketch(waiting, sketch), filter_last=True)
        left = add(f"left_{turn}", _join_in_ranges(waiting.drop("bit"), late, ranges))
        users = left.group_by("user").aggregate(length=left.count()).inner_join(sketch, "user")
        users = users.select("user", free=(users.spare + users.length).cast("int32"))
    else:
        line = add("line", _line_up(waiting, free))
        late = add("late", _once(line.filter(line.late)))
        left = add(f"left_{turn}", line.drop("late").inner_join(late, "priority"))
        free_places = (left.spare.max() + left.count()).cast("int32")
        users = left.group_by("user").aggregate(free=free_places)
    num_to_take = len(steps)
    # Of a user's line of n records, l are left, so n - l were taken: f - (n - l) places are free.
    served = left.inner_join(users, "user").select("priority", "user", "free")
    served = add("served", served)
    refused = add("refused", _once(served.filter(served.free == 0)))
    add(f"waiting_{turn}", served.anti_join(refused, "priority"))
    return tuple(steps[:num_to_take]), tuple(steps[num_to_take:])


def _join_in_ranges(rows: Any, late: Any, ranges: tuple[tuple[int, int], ...]) -> Any:
    """The rows of late records, joined range by range of their priorities."""
    if len(ranges) == 1:
        return rows.inner_join(late, "priority")
    parts: list[Any] = []
    for start, stop in ranges:
        inside: list[Any] = [
            table.filter(table.priority >= start, table.priority < stop) for table in (rows, late)
        ]
        parts.append(inside[0].inner_join(inside[1], "priority"))
    return ibis.union(*parts)


def _once(rows: Any) -> Any:
    """The records of these incidences, each once."""
    return rows.group_by("priority").aggregate()


def _sketch(waiting: Any, free: int) -> Any:
    """For each user without room for all its records: which slots hold any of them.

    Each such slot counts as one record. The records that this misses may be anywhere, so `reach` is
    how far one may count without exceeding `free`.
    """
    bits = waiting.group_by("user").aggregate(length=waiting.count(), some=bit_or(waiting.bit))
    bits = bits.filter(bits.length > free)
    spare = (free - bits.length).cast("int32")
    return bits.select(
        "user", "some", reach=(spare + bit_count(bits.some)).cast("int32"), spare=spare
    )


def _late_by_sketch(waiting: Any, sketch: Any) -> Any:
    """The records that may stand beyond some owner's free places: this round does not take them."""
    joined = waiting.inner_join(sketch, "user")
    upto = joined.bit + (joined.bit - 1)
    return _once(joined.filter(bit_count(joined.some & upto) > joined.reach))


def _line_up(waiting: Any, free: int | None) -> Any:
    """Each user's records in line; users with room for their whole line drop out.

    `spare` is the number of places less the length of the line. `late` says that there is no place.
    """
    # Both windows have the same partition and order, so one sort serves both.
    line = {"group_by": "user", "order_by": "priority"}
    lined = waiting.select(
        "priority",
        "user",
        free=waiting.free if free is None else ibis.literal(free, "int64"),
        position=ibis.row_number().over(ibis.window(**line)),
        length=waiting.count().over(ibis.window(**line, preceding=None, following=None)),
    )
    lined = lined.filter(lined.length > lined.free)
    return lined.select(
        "priority",
        "user",
        spare=(lined.free - lined.length).cast("int32"),
        late=lined.position >= lined.free,
    )
