"""Trading size against bias, so that records of many owners are selected too.

A selection of maximal size prefers records of few owners. The balanced variant alternates between
records of few and of many owners, and a grid of its parameters traces the trade-off. Random subsets
that ignore the bound show what the bias alone costs.

Reference: Ganesh et al. 2025, Sec. 5.5 and App. C.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from userdp.bounding.edges import Edges, Ints
from userdp.bounding.greedy import Order, by_cardinality, greedy_in_order
from userdp.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Alternation:
    """Visit `few_run` records of at most `few_owners` owners, then `many_run` of more; repeat.

    u = `few_owners`, c1 = `few_run`, c2 = `many_run`.
    """

    few_owners: int
    few_run: int = 1
    many_run: int = 1

    def __post_init__(self) -> None:
        for name in ("few_owners", "few_run", "many_run"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: use 1 or more.")


# App. C.5: u in 1..4, and c1 = 1 with c2 in 1..10 or c2 = 1 with c1 in 1..10. (1, 1) is in both.
GRID: tuple[Alternation, ...] = tuple(
    Alternation(few_owners=few_owners, few_run=few_run, many_run=many_run)
    for few_owners in range(1, 5)
    for few_run, many_run in (
        *((1, run) for run in range(1, 11)),
        *((run, 1) for run in range(1, 11)),
    )
)


def balanced(edges: Edges, max_records_per_user: int, alternation: Alternation) -> Ints:
    """Algorithm 2 in an order that alternates between records of few and of many owners.

    Guarantee: no user owns more than k selected records, and no further record could be added.
    Reference: Ganesh et al. 2025, Sec. 5.5.

    >>> edges = Edges.from_lists([[0], [0], [1], [0, 1]], num_users=2)
    >>> balanced(edges, 2, Alternation(few_owners=1)).tolist()
    [1, 0, 1, 1]
    """
    return greedy_in_order(edges, alternating_order(edges, alternation), max_records_per_user)


def alternating_order(edges: Edges, alternation: Alternation) -> Order:
    """The order in which `balanced` visits records.

    Within each group, records go by number of owners, ties in input order. When one group runs out,
    the rest of the other follows.

    >>> edges = Edges.from_lists([[0, 1], [0], [1], [0], [0, 1]], num_users=2)
    >>> alternating_order(edges, Alternation(few_owners=1, few_run=2)).tolist()
    [1, 2, 0, 3, 4]
    """
    order = by_cardinality(edges)
    few = int(np.count_nonzero(edges.cardinality() <= alternation.few_owners))
    # Run r of the few has key 2 r, and run r of the many follows it with key 2 r + 1.
    turn = np.concatenate(
        [
            2 * (np.arange(few) // alternation.few_run),
            2 * (np.arange(len(order) - few) // alternation.many_run) + 1,
        ]
    )
    return order[np.argsort(turn, kind="stable")]


@dataclass(frozen=True, kw_only=True)
class GridPoint:
    """One setting of the grid: the size of its selection and the mean owners of its records."""

    alternation: Alternation
    size: int
    mean_users_per_record: float


def grid(edges: Edges, max_records_per_user: int) -> list[GridPoint]:
    """Size and mean number of owners at all 80 settings of App. C.5, in grid order."""
    cardinality = edges.cardinality()
    points: list[GridPoint] = []
    for alternation in GRID:
        multiplicity = balanced(edges, max_records_per_user, alternation)
        size = int(multiplicity.sum())
        mean = float(cardinality @ multiplicity) / size if size else 0.0
        points.append(GridPoint(alternation=alternation, size=size, mean_users_per_record=mean))
    return points


def pareto_front(points: list[GridPoint]) -> list[GridPoint]:
    """The points that no other beats in size or mean owners without losing in the other.

    They come by decreasing size, hence by increasing mean. Of equal points the first is kept.

    >>> def point(size, mean):
    ...     some = Alternation(few_owners=1)
    ...     return GridPoint(alternation=some, size=size, mean_users_per_record=mean)
    >>> [p.size for p in pareto_front([point(5, 1.0), point(4, 0.9), point(3, 2.0)])]
    [5, 3]
    """
    front: list[GridPoint] = []
    for point in sorted(points, key=lambda p: (-p.size, -p.mean_users_per_record)):
        if not front or point.mean_users_per_record > front[-1].mean_users_per_record:
            front.append(point)
    return front


class Baseline(StrEnum):
    """Which records a random subset is drawn from: all, or those of few or of many owners."""

    ANY = "any"
    LOW = "low"
    HIGH = "high"


def unbounded_random(
    edges: Edges, size: int, *, rng: np.random.Generator, among: Baseline = Baseline.ANY
) -> Ints:
    """A uniformly random subset of `size` records that ignores every bound: NO GUARANTEE.

    Low means at most the median number of owners, and high means more. If fewer than `size` such
    records exist, all are taken. This shows what the bias of a bounded selection costs. Never train
    on it privately: make the `Selection` with guarantee=False.
    Reference: Ganesh et al. 2025, Sec. 5.5.
    """
    cardinality = edges.cardinality()
    median = float(np.median(cardinality)) if len(cardinality) else 0.0
    eligible = {
        Baseline.ANY: np.arange(edges.num_records),
        Baseline.LOW: np.flatnonzero(cardinality <= median),
        Baseline.HIGH: np.flatnonzero(cardinality > median),
    }[among]
    chosen = rng.choice(eligible, size=min(size, len(eligible)), replace=False, shuffle=False)
    multiplicity = np.zeros(edges.num_records, dtype=np.int64)
    multiplicity[chosen] = 1
    return multiplicity
