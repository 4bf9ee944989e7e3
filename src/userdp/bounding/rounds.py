"""Greedy bounding in parallel rounds on a query engine, for graphs that fit in no one's memory.

Sequential greedy looks like a chain, but most decisions do not wait. Give every record a priority
(its place in the greedy order) and let each user line up its undecided records by priority. A
record that stands within the free places of all its owners is taken: even if everything before it
is taken, it fits. A record of a user without free places is refused. All such decisions of a round
are taken at once, and the result is that of Algorithm 2, record by record:

- taking is right: a taken record stood within the free places of each owner, so at most k - 1 of an
  owner's earlier records are ever taken;
- waiting is safe: a record still waiting before a taken one keeps standing within the free places
  of that owner, because of the places up to the taken one, its own was not used;
- refusing is right: a user's free places are used up only by records before every waiting one that
  no longer fits.

The first waiting record of all is decided in every round, so the rounds end; on real graphs after 1
to 15 of them, the undecided part shrinking several times a round. Once what is left fits a stated
budget it is fetched and decided by the compiled sequential pass. That changes nothing but the time:
by the three points above Algorithm 2 agrees with every decision so far, and what it does to a later
record depends on them through the free places alone. So it treats the undecided records, in their
order, as a graph of their own with that many places a user, and the pass is Algorithm 2 on it. A
round may stop for this between taking and refusing: the pass refuses as well.

Lining up a user's records is a sort, the dearest step of a round. The first round, the only one
over all records, makes do with a sketch: the priorities are cut into 62 slots of equal numbers of
records, and a count and a bit set per user say how many records it has and which slots hold any.
Every such slot behind a record's own holds at least one record behind it, which bounds from above
how many stand up to it: what the sketch lets stand does stand, what it leaves open waits. It needs
a few bytes per user whatever the number of records, and an engine may add up parts of it before it
exchanges them.

"Scalable contribution bounding to achieve privacy" (arXiv 2507.23432) lets users propose records
and takes those that all owners propose. Ordering every user's proposals by one common priority, as
here, is what makes the outcome that of sequential greedy.

The expressions are written once, in Ibis, and run on DuckDB (out of core) and Spark.
"""

# Ibis infers columns at run time; its expressions have no static element types.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import ibis
import numpy as np
import pyarrow as pa

from userdp.bounding.compiled import compiled
from userdp.bounding.edges import Edges, Ints, Owners
from userdp.bounding.engines import Database, Engine, connect
from userdp.bounding.greedy import Order, by_cardinality, check_bound
from userdp.bounding.residual import refuse_rest
from userdp.errors import InputError

# `with_priority`: the number of owners, then the record number; 2^22 owners, 2^40 records at most.
_RECORD_BITS = 40

# Slots of the sketch: the bits of a signed 64-bit number, less the sign and one for the mask.
_SLOTS = 62

# Exchanges of data by key to take: the line-up by user; the late records, and the join with them.
SHUFFLES_TO_TAKE = 3

# To refuse: the places left, by user, and the join with them; the refused records, and the join.
SHUFFLES_TO_REFUSE = 4

# A sketch instead of a line-up takes one more for either: a join with it by user.
SHUFFLES_OF_SKETCH = 1

# Undecided incidences that are finished in memory instead of by further rounds: 0.4 GiB for them
# all, or 0.9 GiB if priorities or user numbers have wide gaps.
FINISH_BELOW = 10_000_000


@dataclass(frozen=True, kw_only=True, eq=False)
class Rounds:
    """The greedy selection, and what it took.

    `undecided[r]` is the number of incidences still undecided after round r, less those of users
    known to have room for all; `finished` the number that the sequential pass decided in the end;
    `shuffles` the number of exchanges of data by key; `held_bytes` the most that the engine's
    tables took at the end of a round's queries.
    """

    multiplicity: Ints
    undecided: tuple[int, ...]
    finished: int
    shuffles: int
    held_bytes: int

    @property
    def rounds(self) -> int:
        """The number of rounds on the engine."""
        return len(self.undecided)


def greedy_rounds(
    edges: Edges,
    max_records_per_user: int,
    *,
    engine: Engine = Engine.DUCKDB,
    finish_below: int = FINISH_BELOW,
    memory_limit: str = "4GB",
) -> Rounds:
    """Algorithm 2 in parallel rounds: bit-identical to `greedy`.

    After the first round, at most `finish_below` undecided incidences are finished in memory; with
    0 everything is decided on the engine. `memory_limit` is what DuckDB may use before it goes to
    disk; Spark has its own settings.

    Guarantee: no user owns more than k selected records, and no further record could be added.
    Reference: Ganesh et al. 2025, Alg. 2; the rounds are explained at the top of this file.

    >>> edges = Edges.from_lists([[0, 1], [0], [1, 2], [2]], num_users=3)
    >>> greedy_rounds(edges, 1, finish_below=0).multiplicity.tolist()
    [0, 1, 0, 1]
    """
    check_bound(max_records_per_user)
    order = by_cardinality(edges)
    with (
        tempfile.TemporaryDirectory(prefix="userdp-bound-") as folder,
        connect(engine, Path(folder), memory_limit=memory_limit) as database,
    ):
        owners = database.load(_with_slots(edges, order), "userdp_owners")
        done = refuse_in_rounds(database, owners, max_records_per_user, finish_below=finish_below)
    multiplicity = np.ones(edges.num_records, dtype=np.int64)
    multiplicity[order[done.refused]] = 0
    return Rounds(
        multiplicity=multiplicity,
        undecided=done.undecided,
        finished=done.finished,
        shuffles=done.shuffles,
        held_bytes=done.held_bytes,
    )


def _with_slots(edges: Edges, order: Order) -> pa.Table:
    """Every incidence with its record's place in `order`, its slot as a bit, and the user."""
    # Consecutive numbers from zero, and narrow: engines count and join those fastest.
    priority = np.empty(edges.num_incidences, dtype=order.dtype)
    bit = np.empty(edges.num_incidences, dtype=np.int64)
    user = np.empty_like(edges.owners)
    width = -(-edges.num_records // _SLOTS)
    _spread(edges.indptr, edges.owners, order, width, priority, bit, user)
    return pa.table({"priority": priority, "bit": bit, "user": user})


@compiled
def _spread(
    indptr: Ints,
    owners: Owners,
    order: Order,
    width: int,
    priority: Order,
    bit: Ints,
    user: Owners,
) -> None:
    """Write the incidences by place, each with its place and slot; a slot has `width` places."""
    row = 0
    for place in range(len(order)):
        record = order[place]
        slot = np.int64(1) << (place // width)
        for at in range(indptr[record], indptr[record + 1]):
            priority[row] = place
            bit[row] = slot
            user[row] = owners[at]
            row += 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Refused:
    """The priorities of the records that Algorithm 2 refuses, and what it took: see `Rounds`."""

    refused: Ints
    undecided: tuple[int, ...]
    finished: int
    shuffles: int
    held_bytes: int


def refuse_in_rounds(
    database: Database, prioritised: Any, max_records_per_user: int, *, finish_below: int
) -> Refused:
    """The records that Algorithm 2 refuses; all others are taken.

    `prioritised` is an Ibis table of `database` with integer columns `priority` and `user`: see
    `with_priority` and `records_of`. With a column `bit`, a power of two below 2^62 that never
    falls as the priority rises, the first round takes the sketch; priorities and users are then
    numbered from zero without wide gaps. Tables named userdp_round_* are made and dropped.
    """
    if finish_below < 0:
        raise InputError(
            f"finish_below={finish_below}: give a number of incidences, or 0 to decide all of them "
            "on the engine."
        )
    source, waiting = None, prioritised
    if not isinstance(prioritised.op(), ibis.expr.operations.UnboundTable):
        # It is read several times.
        source = "userdp_round_source"
        waiting = database.store(source, prioritised)
    left = database.count(waiting)
    undecided: list[int] = []
    refused: list[Ints] = [np.zeros(0, dtype=np.int64)]
    held = shuffles = 0
    # The first round is the engine's whatever is left: it was asked to work, and it counts.
    while left > (finish_below if undecided else 0):
        sketched = "bit" in waiting.columns
        to_take, to_refuse = _steps(
            waiting.get_name(),
            tuple(waiting.schema().items()),
            None if undecided else max_records_per_user,
            # Two names in turn, so that the queries of all rounds are translated once.
            len(undecided) % 2,
            _ranges(database, waiting) if sketched else (),
        )
        made = [database.store(*step) for step in to_take]
        left = database.count(made[-1])
        shuffles += SHUFFLES_TO_TAKE + SHUFFLES_OF_SKETCH * sketched
        if left > finish_below:
            made += [database.store(*step) for step in to_refuse]
            refused.extend(database.fetch(made[-2]))
            left = database.count(made[-1])
            shuffles += SHUFFLES_TO_REFUSE + SHUFFLES_OF_SKETCH * sketched
        held = max(held, database.held_bytes())
        if left <= finish_below:
            sketch = made[0].select("user", "spare") if sketched else None
            refused.append(refuse_rest(database, made[-1], sketch, max_records_per_user))
        *done, following = made
        database.drop(*(table.get_name() for table in done))
        if undecided:
            database.drop(waiting.get_name())
        waiting = following
        undecided.append(left)
    if undecided:
        database.drop(waiting.get_name())
    if source is not None:
        database.drop(source)
    return Refused(
        refused=np.concatenate(refused),
        undecided=tuple(undecided),
        finished=left,
        shuffles=shuffles,
        held_bytes=held,
    )


def with_priority(owners: Any) -> Any:
    """Every incidence (`record`, `user`, each pair once) with its record's place in greedy order.

    For tables of any size that the engine reads by itself: one exchange by record. The priorities
    have gaps, so that there are no slots: every round lines up.
    """
    cardinality = owners.count().over(ibis.window(group_by="record"))
    priority = cardinality.cast("int64") * (1 << _RECORD_BITS) + owners.record.cast("int64")
    return owners.select(priority=priority, user=owners.user)


def records_of(priority: Ints) -> Ints:
    """The record numbers of priorities of `with_priority`.

    >>> records_of(np.array([(2 << 40) | 7])).tolist()
    [7]
    """
    return priority & ((1 << _RECORD_BITS) - 1)


@ibis.udf.agg.builtin
def bit_or(bits: int) -> int:  # pyright: ignore[reportReturnType]
    """The bits set in any row: engines have it, Ibis does not translate it for all of them."""


@ibis.udf.scalar.builtin
def bit_count(bits: int) -> int:  # pyright: ignore[reportReturnType]
    """The number of bits set."""


class Step(NamedTuple):
    """A table to be made; `filter_last` as `Database.store` takes it."""

    name: str
    rows: Any
    filter_last: bool = False


def _ranges(database: Database, waiting: Any) -> tuple[tuple[int, int], ...]:
    """Ranges of priorities, all of them together, that the engine joins best one by one."""
    (last,) = database.fetch(waiting.aggregate(last=waiting.priority.max()))
    width = database.join_range or int(last[0]) + 1
    return tuple((start, start + width) for start in range(0, int(last[0]) + 1, width))


@lru_cache(maxsize=64)
def _steps(
    name: str,
    columns: tuple[tuple[str, Any], ...],
    free: int | None,
    turn: int,
    ranges: tuple[tuple[int, int], ...],
) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The tables of one round in the order they are made, to take records and then to refuse some.

    The last of the first part is what was not taken; a user has `spare` more places than such
    records (fewer, if negative), which the sketch says or a column. The last two of the second part
    are the refused records, and what still waits, with `free` places. `free` are everyone's places
    in the first round; later it is a column.
    """
    steps: list[Step] = []

    def add(step: str, rows: Any, *, filter_last: bool = False) -> Any:
        steps.append(Step(f"userdp_round_{step}", rows, filter_last))
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
    # A user's line less what is left of it was taken: f - (n - l) places of f are free.
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
    """The records of some incidences, each once."""
    return rows.group_by("priority").aggregate()


def _sketch(waiting: Any, free: int) -> Any:
    """Of each user without room for its whole line: which slots hold any of its records.

    Each counts one record, and those that this leaves out may be anywhere: `reach` is how far one
    may count without exceeding `free`.
    """
    bits = waiting.group_by("user").aggregate(length=waiting.count(), some=bit_or(waiting.bit))
    bits = bits.filter(bits.length > free)
    spare = (free - bits.length).cast("int32")
    return bits.select(
        "user", "some", reach=(spare + bit_count(bits.some)).cast("int32"), spare=spare
    )


def _late_by_sketch(waiting: Any, sketch: Any) -> Any:
    """The records that may stand beyond the free places of some owner: not taken in this round."""
    joined = waiting.inner_join(sketch, "user")
    upto = joined.bit + (joined.bit - 1)
    return _once(joined.filter(bit_count(joined.some & upto) > joined.reach))


def _line_up(waiting: Any, free: int | None) -> Any:
    """Each user's records in line; users with room for their whole line drop out.

    `spare` is the places less the length of the line, `late` whether there is no place.
    """
    # Both windows have one partition and order, so that one sort serves them.
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
