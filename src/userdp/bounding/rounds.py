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
to 15 of them, the undecided part shrinking several times a round. The tail is finished by the
compiled sequential pass, which changes nothing but the time.

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
from pathlib import Path
from typing import Any

import ibis
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from userdp.bounding.edges import Edges, Ints
from userdp.bounding.engines import Database, Engine, connect
from userdp.bounding.greedy import check_bound, take_in_order

# A priority is the number of owners, then the record number: 2^22 owners and 2^40 records at most.
_RECORD_BITS = 40

# Exchanges of data by key in one round: the line-up by user; the late records, and the join with
# them; the places used, by user, and the join with them; the refused records, and the join.
SHUFFLES_PER_ROUND = 7

# Undecided incidences that are finished in memory instead of by further rounds.
FINISH_BELOW = 50_000


@dataclass(frozen=True, kw_only=True, eq=False)
class Rounds:
    """The greedy selection, and what it took.

    `undecided[r]` is the number of incidences still undecided after round r; `finished` the number
    that the sequential pass decided in the end; `held_bytes` the most that the engine's tables took
    at the end of a round's queries.
    """

    multiplicity: Ints
    undecided: tuple[int, ...]
    finished: int
    held_bytes: int

    @property
    def rounds(self) -> int:
        """The number of rounds on the engine."""
        return len(self.undecided)

    @property
    def shuffles(self) -> int:
        """The number of exchanges of data by key."""
        return SHUFFLES_PER_ROUND * self.rounds


def greedy_rounds(
    edges: Edges,
    max_records_per_user: int,
    *,
    engine: Engine = Engine.DUCKDB,
    finish_below: int = FINISH_BELOW,
    memory_limit: str = "4GB",
) -> Rounds:
    """Algorithm 2 in parallel rounds: bit-identical to `greedy`.

    `memory_limit` is what DuckDB may use before it goes to disk; Spark has its own settings.

    Guarantee: no user owns more than k selected records, and no further record could be added.
    Reference: Ganesh et al. 2025, Alg. 2; the rounds are explained at the top of this file.

    >>> edges = Edges.from_lists([[0, 1], [0], [1, 2], [2]], num_users=3)
    >>> greedy_rounds(edges, 1, finish_below=0).multiplicity.tolist()
    [0, 1, 0, 1]
    """
    check_bound(max_records_per_user)
    with tempfile.TemporaryDirectory(prefix="userdp-bound-") as name:
        folder = Path(name)
        cardinality = edges.cardinality()
        priority = (cardinality << _RECORD_BITS) | np.arange(edges.num_records)
        table = pa.table({"priority": np.repeat(priority, cardinality), "user": edges.owners})
        pq.write_table(table, folder / "owners.parquet", compression="none", use_dictionary=False)
        with connect(engine, folder, memory_limit=memory_limit) as database:
            line = database.read_parquet(folder / "owners.parquet", "owners")
            done = refuse_in_rounds(database, line, max_records_per_user, finish_below=finish_below)
    multiplicity = np.ones(edges.num_records, dtype=np.int64)
    multiplicity[done.refused] = 0
    return Rounds(
        multiplicity=multiplicity,
        undecided=done.undecided,
        finished=done.finished,
        held_bytes=done.held_bytes,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Refused:
    """The numbers of the records that Algorithm 2 refuses, and what it took: see `Rounds`."""

    refused: Ints
    undecided: tuple[int, ...]
    finished: int
    held_bytes: int


def refuse_in_rounds(
    database: Database, prioritised: Any, max_records_per_user: int, *, finish_below: int
) -> Refused:
    """The records that Algorithm 2 refuses; all others are taken.

    `prioritised` is an Ibis table of `database` with integer columns `priority` and `user`: see
    `with_priority`. Tables named userdp_round_* are made and dropped.
    """

    def keep(name: str, expression: Any) -> Any:
        return database.store(f"userdp_round_{name}", expression)

    def drop(*names: str) -> None:
        for name in names:
            database.run(f"DROP TABLE userdp_round_{name}")

    waiting = prioritised.mutate(free=ibis.literal(max_records_per_user, "int64"))
    left = database.count(waiting)
    undecided: list[int] = []
    refused: list[Ints] = []
    held = 0
    while left > finish_below:
        number = len(undecided) + 1
        line = keep("line", _line_up(waiting))
        late = keep("late", _late(line))
        judged = keep("judged", _judge(line, late))
        served = keep("served", _serve(judged))
        full = keep("full", _full(served))
        refused.extend(database.fetch(full))
        waiting = keep(f"waiting_{number}", served.anti_join(full, "priority"))
        held = max(held, database.held_bytes())
        drop("line", "late", "judged", "served", "full")
        if number > 1:
            drop(f"waiting_{number - 1}")
        left = database.count(waiting)
        undecided.append(left)
    refused.append(_finish(*database.fetch(waiting)))
    if undecided:
        drop(f"waiting_{len(undecided)}")
    return Refused(
        refused=np.concatenate(refused) & ((1 << _RECORD_BITS) - 1),
        undecided=tuple(undecided),
        finished=left,
        held_bytes=held,
    )


def with_priority(owners: Any) -> Any:
    """Every incidence (`record`, `user`, each pair once) with its record's place in greedy order.

    For tables of any size that the engine reads by itself: one exchange by record.
    """
    cardinality = owners.count().over(ibis.window(group_by="record"))
    priority = cardinality.cast("int64") * (1 << _RECORD_BITS) + owners.record.cast("int64")
    return owners.select(priority=priority, user=owners.user)


def _line_up(waiting: Any) -> Any:
    """Each user's records in line; users with room for their whole line drop out."""
    # Both windows have one partition and order, so that one sort serves them.
    line = {"group_by": "user", "order_by": "priority"}
    lined = waiting.mutate(
        position=ibis.row_number().over(ibis.window(**line)),
        length=waiting.count().over(ibis.window(**line, preceding=None, following=None)),
    )
    return lined.filter(lined.length > lined.free).select("priority", "user", "free", "position")


def _late(line: Any) -> Any:
    """The records that stand beyond the free places of some owner: not taken in this round."""
    return line.filter(line.position >= line.free).select("priority").distinct()


def _judge(line: Any, late: Any) -> Any:
    """Whether the record of each incidence is taken."""
    late = late.rename(late="priority")
    joined = line.left_join(late, line.priority == late.late)
    return joined.select("priority", "user", "free", taken=joined.late.isnull())


def _serve(judged: Any) -> Any:
    """The records that still wait, with the free places that are left."""
    used = judged.group_by("user").aggregate(used=judged.taken.cast("int64").sum())
    used = used.rename(taker="user")
    waiting = judged.filter(~judged.taken)
    joined = waiting.inner_join(used, waiting.user == used.taker)
    return joined.select("priority", "user", free=joined.free - joined.used)


def _full(served: Any) -> Any:
    """The records of a user without free places: refused."""
    return served.filter(served.free == 0).select("priority").distinct()


def _finish(priority: Ints, user: Ints, free: Ints) -> Ints:
    """The priorities that the sequential pass refuses among what is still undecided."""
    order = np.argsort(priority, kind="stable")
    priority, user, free = priority[order], user[order], free[order]
    first = np.flatnonzero(np.r_[True, priority[1:] != priority[:-1]][: len(priority)])
    records = priority[first]
    users, number = np.unique(user, return_inverse=True)
    number = number.reshape(-1)
    room = np.zeros(len(users), dtype=np.int64)
    room[number] = free
    taken = np.zeros(len(records), dtype=np.int64)
    indptr = np.append(first, len(priority)).astype(np.int64)
    take_in_order(indptr, number, np.arange(len(records)), room, taken)
    return records[taken == 0]
