"""Batches with min-separation and the smallest possible bound, by an integer program.

Reference: Ganesh et al. 2025, App. C.4, the last program.
"""

from __future__ import annotations

import numpy as np

from userdp.bounding.edges import Edges, Ints
from userdp.bounding.min_sep import Separated, check_shape, count_bound
from userdp.bounding.solver import maximise
from userdp.errors import InputError

# Beyond this many variables the program is hopeless.
LARGEST_PROGRAM = 200_000


def exact_min_separation(
    edges: Edges, *, steps: int, batch_size: int, separation: int, time_limit: float = 60.0
) -> tuple[Separated, bool] | None:
    """Batches with the smallest contribution bound k at this separation, by integer program.

    This is for small cases: the program has a variable for each record and step. It returns the
    batches, and whether their bound is proven to be the smallest. It returns None if no such
    batches exist.
    Reference: Ganesh et al. 2025, App. C.4, the last program.

    >>> edges = Edges.from_lists([[0], [0, 1], [1]], num_users=2)
    >>> exact_min_separation(edges, steps=2, batch_size=1, separation=2)[0].realised_bound
    1
    """
    check_shape(steps, batch_size, separation)
    records, users = edges.num_records, edges.num_users
    size = records * steps
    if size > LARGEST_PROGRAM:
        raise InputError(
            f"{records:,} records x {steps:,} steps = {size:,} variables: the program is for at "
            f"most {LARGEST_PROGRAM:,}. Use min_separation."
        )
    window = min(separation, steps)
    starts = steps - window + 1
    owner_row = edges.owners.astype(np.int64)
    record = edges.record_of_incidence()
    # Variables: x[i, t] at i * T + t, then T - k. Rows: windows (user, start), totals (user),
    # batches (t).
    rows: list[Ints] = []
    columns: list[Ints] = []
    for step in range(steps):
        for start in range(max(0, step - window + 1), min(step, starts - 1) + 1):
            rows.append(owner_row * starts + start)
            columns.append(record * steps + step)
        rows.append(users * starts + owner_row)
        columns.append(record * steps + step)
        rows.append(np.full(records, users * (starts + 1) + step))
        columns.append(np.arange(records) * steps + step)
    plus_ones = sum(len(part) for part in rows)
    rows.append(users * starts + np.arange(users))
    columns.append(np.full(users, size))
    solved = maximise(
        np.r_[np.zeros(size, dtype=np.int64), 1],
        rows=np.concatenate(rows),
        columns=np.concatenate(columns),
        entries=np.ones(plus_ones + users, dtype=np.int64),
        lower=np.r_[np.full(users * (starts + 1), -np.inf), np.full(steps, float(batch_size))],
        upper=np.r_[
            np.ones(users * starts), np.full(users, float(steps)), np.full(steps, float(batch_size))
        ],
        most=np.r_[np.ones(size, dtype=np.int64), steps],
        time_limit=time_limit,
    )
    if solved.infeasible:
        return None
    if solved.values is None:
        raise InputError(
            f"no batches found within time_limit={time_limit} seconds: give more time, or use "
            "min_separation."
        )
    chosen = solved.values[:size].reshape(records, steps) == 1
    batches = np.stack([np.flatnonzero(chosen[:, step]) for step in range(steps)])
    found = Separated(
        batches=batches, separation=separation, realised_bound=count_bound(edges, batches)
    )
    return found, solved.proven
