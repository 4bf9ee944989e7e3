"""Greedy bounding in parallel rounds on a query engine, for graphs larger than any memory.

Algorithm 2 looks sequential, but most of its decisions do not depend on each other. Every record
gets a priority, its place in the greedy order. Every user lines up its undecided records by
priority. A record is taken if it stands within the free places of all its owners: it fits even if
everything before it is taken. A record is refused if one of its owners has no free place. A round
makes all such decisions at once. The result is that of Algorithm 2, record by record:

- Taking is right. A taken record stood within the free places of each owner, so at most k - 1 of an
  owner's earlier records are ever taken.
- Waiting is safe. Suppose a record waits in line before one that is taken. It keeps standing within
  the free places of that owner, because its own place was not used.
- Refusing is right. A user's free places are used up only by records that come before every waiting
  record that no longer fits.

Every round decides at least the first waiting record, so the rounds end. Real graphs take 1 to 15
rounds, and each leaves a fraction of what was undecided. Once the rest fits a given budget, it is
fetched and decided by the compiled sequential pass. The selection stays the same: by the three
points above, Algorithm 2 agrees with every decision so far, and these affect later records through
the free places alone. The undecided records, in their order, therefore form a smaller graph with
that many places per user, and the pass is Algorithm 2 on it. A round may stop for this between
taking and refusing, because the pass refuses as well.

Lining up a user's records is a sort, the most expensive part of a round. The first round, the only
one over all records, uses a sketch instead. The priorities are cut into 62 slots of equally many
records. For each user, a count says how many records it has, and a bit set says which slots hold
any. Each such slot behind a record's own holds at least one record that comes later. This bounds
from above how many stand up to the record. A record that the sketch lets stand really stands within
the free places; a record that it leaves open waits. The sketch needs a few bytes per user, however
many records there are, and an engine may add up parts of it before exchanging them.

In "Scalable contribution bounding to achieve privacy" (arXiv 2507.23432) users propose records, and
those that all owners propose are taken. Here all users order their proposals by one common
priority. This makes the outcome that of sequential greedy.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ibis
import numpy as np
import pyarrow as pa

from userdp.bounding.edges import Edges, Ints, Owners
from userdp.bounding.greedy import Order, by_cardinality, check_bound
from userdp.bounding.remainder import arrays_of, refuse_rest
from userdp.bounding.round_queries import Query, queries_of_round
from userdp.compiled import compiled
from userdp.data.engine import Engine, EngineName, engine_of
from userdp.errors import InputError

# Slots of the sketch: the bits of a signed 64-bit number, less the sign and one for the mask.
_SLOTS = 62

# How often a round exchanges data by key. To take: the line-up by user, the late records, and the
# join with them.
SHUFFLES_TO_TAKE = 3

# To refuse: the places left by user, the join with them, the refused records, and that join.
SHUFFLES_TO_REFUSE = 4

# With a sketch instead of a line-up, each of the two takes one more: a join with it by user.
SHUFFLES_OF_SKETCH = 1

# From this many undecided incidences on, they are finished in memory and not in further rounds.
# That takes 0.4 GiB, or 0.9 GiB if priorities or user numbers have wide gaps.
FINISH_BELOW = 10_000_000


@dataclass(frozen=True, kw_only=True, eq=False)
class Rounds:
    """The greedy selection, and what it took.

    `undecided[r]` is the number of incidences still undecided after round r, without those of users
    who have room for all their records. `finished` is the number that the sequential pass decided
    in the end. `shuffles` counts exchanges of data by key. `held_bytes` is the most that the
    engine's tables took at the end of a round.
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
    engine: EngineName = EngineName.DUCKDB,
    finish_below: int = FINISH_BELOW,
    memory_limit: str = "4GB",
) -> Rounds:
    """Algorithm 2 in parallel rounds: bit-identical to `greedy`.

    After the first round, at most `finish_below` undecided incidences are finished in memory. With
    0, everything is decided on the engine. `memory_limit` is what DuckDB may use before it writes
    to disk; Spark has its own settings.

    Guarantee: no user owns more than k selected records, and no further record could be added.
    Reference: Ganesh et al. 2025, Alg. 2. The top of this file explains the rounds.

    >>> edges = Edges.from_lists([[0, 1], [0], [1, 2], [2]], num_users=3)
    >>> greedy_rounds(edges, 1, finish_below=0).multiplicity.tolist()
    [0, 1, 0, 1]
    """
    check_bound(max_records_per_user)
    order = by_cardinality(edges)
    with (
        tempfile.TemporaryDirectory(prefix="userdp-bound-") as folder,
        engine_of(engine, Path(folder), memory_limit=memory_limit, count_by_place=True) as opened,
    ):
        owners = opened.load("userdp_owners", _with_slots(edges, order))
        done = refuse_in_rounds(opened, owners, max_records_per_user, finish_below=finish_below)
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
    # Narrow consecutive numbers from zero: engines count and join those fastest.
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
    """Write the incidences in greedy order, with place and slot; a slot has `width` places."""
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
    engine: Engine, prioritised: Any, max_records_per_user: int, *, finish_below: int
) -> Refused:
    """The records that Algorithm 2 refuses; it takes all others.

    `prioritised` is an Ibis table of `engine` with integer columns `priority` and `user`: see
    `with_priority` and `records_of`. It may have a column `bit`, a power of two below 2^62 that
    never falls as the priority rises. Then the first round uses the sketch, and priorities and
    users must be numbered from zero without wide gaps. This function makes and drops tables named
    userdp_round_*.
    """
    if finish_below < 0:
        raise InputError(
            f"finish_below={finish_below}: give a number of incidences, or 0 to decide all of them "
            "on the engine."
        )
    source, waiting = None, prioritised
    if not isinstance(prioritised.op(), ibis.expr.operations.UnboundTable):
        # Computed once, because it is read several times.
        source = "userdp_round_source"
        waiting = engine.hold(source, prioritised)
    left = engine.count(waiting)
    undecided: list[int] = []
    refused: list[Ints] = [np.zeros(0, dtype=np.int64)]
    held = shuffles = 0
    # The first round always runs on the engine, however little there is.
    while left > (finish_below if undecided else 0):
        sketched = "bit" in waiting.columns
        to_take, to_refuse = queries_of_round(
            waiting.get_name(),
            tuple(waiting.schema().items()),
            None if undecided else max_records_per_user,
            # Two names in turn, so that the queries of all rounds are translated once.
            len(undecided) % 2,
            _ranges(engine, waiting) if sketched else (),
        )
        made = _held(engine, to_take)
        left = engine.count(made[-1])
        shuffles += SHUFFLES_TO_TAKE + SHUFFLES_OF_SKETCH * sketched
        if left > finish_below:
            made += _held(engine, to_refuse)
            refused.append(arrays_of(engine.fetch(made[-2]))["priority"])
            left = engine.count(made[-1])
            shuffles += SHUFFLES_TO_REFUSE + SHUFFLES_OF_SKETCH * sketched
        held = max(held, engine.held_bytes())
        if left <= finish_below:
            sketch = made[0].select("user", "spare") if sketched else None
            refused.append(refuse_rest(engine, made[-1], sketch, max_records_per_user))
        *done, following = made
        engine.drop(*(table.get_name() for table in done))
        if undecided:
            engine.drop(waiting.get_name())
        waiting = following
        undecided.append(left)
    if undecided:
        engine.drop(waiting.get_name())
    if source is not None:
        engine.drop(source)
    return Refused(
        refused=np.concatenate(refused),
        undecided=tuple(undecided),
        finished=left,
        shuffles=shuffles,
        held_bytes=held,
    )


def _held(engine: Engine, queries: tuple[Query, ...]) -> list[Any]:
    return [engine.hold(name, rows, filter_last=last) for name, rows, last in queries]


def _ranges(engine: Engine, waiting: Any) -> tuple[tuple[int, int], ...]:
    """Ranges that cover all priorities, each of a width that the engine joins fastest."""
    last = int(arrays_of(engine.fetch(waiting.aggregate(last=waiting.priority.max())))["last"][0])
    width = engine.join_range or last + 1
    return tuple((start, start + width) for start in range(0, last + 1, width))
