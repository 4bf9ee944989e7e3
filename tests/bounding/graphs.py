"""Small random graphs of owners, and slow readings of the definitions to compare with."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import strategies as st

from userdp.bounding.edges import Edges


@st.composite
def edges(draw: st.DrawFn, *, max_users: int = 6, max_records: int = 12) -> Edges:
    num_users = draw(st.integers(1, max_users))
    owners = st.sets(st.integers(0, num_users - 1), min_size=1, max_size=min(4, num_users))
    records = draw(st.lists(owners.map(sorted), max_size=max_records))
    return Edges.from_lists(records, num_users=num_users)


def owners_of(graph: Edges) -> list[list[int]]:
    return [part.tolist() for part in np.split(graph.owners, graph.indptr[1:-1])][
        : graph.num_records
    ]


def fits(graph: Edges, multiplicity: np.ndarray, bound: int) -> bool:
    """Whether the bound holds, counted in plain Python."""
    counts = [0] * graph.num_users
    for owners, copies in zip(owners_of(graph), multiplicity.tolist(), strict=True):
        for owner in owners:
            counts[owner] += copies
    return max(counts) <= bound


def plain_greedy(graph: Edges, bound: int, *, duplicates: bool = False) -> list[int]:
    """Algorithms 2 and 3 as printed, line by line."""
    rows = owners_of(graph)
    counts = [0] * graph.num_users
    selected = [0] * len(rows)
    while True:
        added = False
        for record in sorted(range(len(rows)), key=lambda i: len(rows[i])):
            if all(counts[owner] < bound for owner in rows[record]):
                for owner in rows[record]:
                    counts[owner] += 1
                selected[record] += 1
                added = True
        if not duplicates or not added:
            return selected


def brute_force(graph: Edges, bound: int, weights: list[int], *, most: int) -> int:
    """The largest weight of any selection within the bound, by trying them all."""
    best = 0
    for copies in product(range(most + 1), repeat=graph.num_records):
        if fits(graph, np.array(copies, dtype=np.int64), bound):
            best = max(best, sum(c * w for c, w in zip(copies, weights, strict=True)))
    return best


def is_separated(graph: Edges, batches: np.ndarray, separation: int) -> bool:
    """Whether every user owns at most one record in every window of consecutive batches."""
    rows = owners_of(graph)
    for start in range(len(batches)):
        window = [
            owner
            for record in batches[start : start + separation].reshape(-1)
            for owner in rows[record]
        ]
        if len(set(window)) < len(window):
            return False
    return True
