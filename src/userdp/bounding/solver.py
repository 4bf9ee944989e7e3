"""The only use of scipy's HiGHS: it solves integer programs and checks the whole numbers found."""

# scipy has no type stubs, and what pyright infers from its sources is wrong for arrays.
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csc_array

from userdp.bounding.edges import Ints

Floats = NDArray[np.float64]

# HiGHS works in floating point, so its bound may be wrong by this relative amount.
BOUND_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class Solved:
    """The best `values` found, if any, and a proven upper bound on their worth, if any."""

    values: Ints | None
    upper_bound: int | None
    proven: bool
    infeasible: bool


def maximise(
    worth: Ints,
    *,
    rows: Ints,
    columns: Ints,
    entries: Ints,
    lower: Floats,
    upper: Floats,
    most: Ints,
    time_limit: float,
) -> Solved:
    """Maximise `worth` @ x over whole 0 <= x <= `most` with `lower` <= A x <= `upper`.

    A has `entries` at (`rows`, `columns`). A solution that violates a row after rounding is
    dropped.

    >>> one, both = np.ones(2, dtype=np.int64), np.arange(2)
    >>> found = maximise(
    ...     one, rows=0 * both, columns=both, entries=one, lower=np.zeros(1), upper=np.ones(1),
    ...     most=one, time_limit=10.0,
    ... )
    >>> int(found.values.sum()), found.upper_bound, found.proven
    (1, 1, True)
    """
    matrix = csc_array(
        (entries.astype(np.float64), (rows, columns)), shape=(len(upper), len(worth))
    )
    result = milp(
        -worth.astype(np.float64),
        integrality=np.ones(len(worth)),
        bounds=Bounds(0, most.astype(np.float64)),
        constraints=LinearConstraint(matrix, lower, upper),
        # A limit of 0 would mean none at all.
        options={"time_limit": max(time_limit, 0.01), "mip_rel_gap": 0.0},
    )
    bound = None
    if result.mip_dual_bound is not None and np.isfinite(result.mip_dual_bound):
        dual = -float(result.mip_dual_bound)
        bound = int(np.floor(dual + BOUND_TOLERANCE * max(1.0, abs(dual))))
    values = None
    if result.x is not None:
        rounded = np.clip(np.rint(result.x).astype(np.int64), 0, most)
        reached = np.asarray(matrix @ rounded)
        if bool(((reached >= lower) & (reached <= upper)).all()):
            values = rounded
    if values is not None and result.status == 0:
        # The proven gap is far below 1, and the objective is a whole number.
        bound = int(worth @ values)
    return Solved(
        values=values,
        upper_bound=bound,
        proven=result.status == 0,
        infeasible=result.status == 2,
    )
