"""The proven optimum of contribution bounding, with and without duplicates.

Maximising the number of selected records is NP-hard (Ganesh et al. 2025, App. B.1). On real data,
however, exact reductions decide most of the graph, and HiGHS (through scipy) proves the rest. The
answer says whether it is proven. If the time ran out, it says how far the optimum can be.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from userdp.bounding import greedy
from userdp.bounding.edges import Edges, Ints
from userdp.bounding.reductions import Flags, Groups, merge_identical, reduce
from userdp.bounding.solver import maximise
from userdp.errors import InputError


@dataclass(frozen=True, kw_only=True, eq=False)
class Optimum:
    """The best selection found, and what is proven about it.

    `value` is the total weight of `multiplicity` (its size, without weights); no selection within
    the bound has more than `upper_bound`. `residual` is the number of variables left to the solver.
    """

    multiplicity: Ints
    value: int
    upper_bound: int
    residual: int

    @property
    def optimal(self) -> bool:
        """Whether nothing better exists."""
        return self.value == self.upper_bound


def exact(
    edges: Edges,
    max_records_per_user: int,
    *,
    weights: ArrayLike | None = None,
    time_limit: float = 60.0,
) -> Optimum:
    """The largest selection of distinct records, or the heaviest one if public `weights` are given.

    Solves max sum_i w_i x_i : sum_{i: j in e_i} x_i <= k for every user j, x_i in {0, 1}. After
    about `time_limit` seconds it returns the best selection found and a bound on the optimum.

    Guarantee: no user owns more than k selected records.
    Reference: Ganesh et al. 2025, App. C.4, Eq. 1.

    >>> best = exact(Edges.from_lists([[0, 1], [0, 2], [1, 2], [2]], num_users=3), 1)
    >>> best.value, best.optimal
    (2, True)
    """
    deadline = _deadline(time_limit)
    greedy.check_bound(max_records_per_user)
    ones = np.ones(edges.num_records, dtype=np.int64)
    worth = ones if weights is None else greedy.check_weights(edges, weights)

    residual = reduce(edges, max_records_per_user, worth)
    multiplicity = residual.taken.astype(np.int64)
    base = int(worth @ multiplicity)
    groups = merge_identical(residual.record, residual.user, worth)
    worth_of_group = worth[groups.members[groups.starts[:-1]]]
    copies, bound = _solve(
        groups, worth_of_group, free=residual.free, most=groups.sizes, deadline=deadline
    )
    chosen = np.arange(len(groups.members)) - np.repeat(groups.starts[:-1], groups.sizes)
    multiplicity[groups.members[chosen < np.repeat(copies, groups.sizes)]] = 1
    candidates = [multiplicity]
    if int(worth @ multiplicity) < base + bound:
        # Out of time: add what still fits, and never return less than the greedy algorithm does.
        rest = greedy.by_weight_per_owner(edges, worth)
        rest = rest[multiplicity[rest] == 0]
        candidates.append(greedy.fill_up(edges, rest, multiplicity, max_records_per_user))
        candidates.append(greedy.greedy_weighted(edges, worth, max_records_per_user))
    return _best(candidates, worth, upper_bound=base + bound, residual=len(copies))


def exact_duplicates(
    edges: Edges, max_records_per_user: int, *, time_limit: float = 60.0
) -> Optimum:
    """The largest selection when records may be repeated: x_i any whole number.

    The program cannot tell records with the same binding owners apart, so it spreads copies evenly
    over them. The optimum repeats records of few owners; `Selection.distinct` shows at what price.

    Guarantee: no user owns more than k selected records, copies counted.
    Reference: Ganesh et al. 2025, App. C.4, Eq. 1 with x_i in Z>=0, and Fig. 11.

    >>> edges = Edges.from_lists([[0], [0, 1], [0, 2], [1, 2], [0, 3]], num_users=4)
    >>> best = exact_duplicates(edges, 3)
    >>> best.value, best.multiplicity.tolist(), best.optimal
    (6, [3, 0, 0, 3, 0], True)
    """
    deadline = _deadline(time_limit)
    greedy.check_bound(max_records_per_user)
    multiplicity = np.zeros(edges.num_records, dtype=np.int64)
    ones = np.ones(edges.num_records, dtype=np.int64)
    groups = merge_identical(edges.record_of_incidence(), edges.owners.astype(np.int64), ones)
    base = 0
    while True:
        # If a user is the only owner of a record, k copies of it are best: a copy can replace any
        # other record of this user, one for one. The user is then full.
        width = np.diff(groups.indptr)
        alone = np.flatnonzero(width == 1)
        full = np.zeros(edges.num_users, dtype=np.bool_)
        full[groups.owners[groups.indptr[alone]]] = True
        base += max_records_per_user * len(alone)
        copies = np.zeros(len(width), dtype=np.int64)
        copies[alone] = max_records_per_user
        _spread(groups, copies, multiplicity)
        group = np.repeat(np.arange(len(width)), width)
        refused = np.bincount(group[full[groups.owners]], minlength=len(width)) > 0

        # A user in a single remaining group is full no sooner than the group's other owners.
        # Forget this user, unless the group would have no owner left.
        keep = ~refused[group]
        degree = np.bincount(groups.owners[keep], minlength=edges.num_users)
        lonely = keep & (degree[groups.owners] == 1)
        guarded = np.bincount(group[keep & ~lonely], minlength=len(width)) > 0
        first = groups.indptr[:-1][group] == np.arange(len(group))
        keep &= ~lonely | (first & ~guarded[group])
        if bool(keep.all()):
            break
        groups = _regroup(groups, group, keep)

    copies, bound = _solve(
        groups,
        np.ones(len(groups.sizes), dtype=np.int64),
        free=np.full(edges.num_users, max_records_per_user, dtype=np.int64),
        most=np.full(len(groups.sizes), max_records_per_user, dtype=np.int64),
        deadline=deadline,
    )
    _spread(groups, copies, multiplicity)
    candidates = [multiplicity]
    if int(multiplicity.sum()) < base + bound:
        candidates.append(greedy.fill_up_duplicates(edges, multiplicity, max_records_per_user))
        candidates.append(greedy.greedy_duplicates(edges, max_records_per_user))
    return _best(candidates, ones, upper_bound=base + bound, residual=len(copies))


def _regroup(groups: Groups, group: Ints, keep: Flags) -> Groups:
    """The groups over the kept incidences, merged again. A group without owners is dropped."""
    sizes = groups.sizes
    kept_owners = np.bincount(group[keep], minlength=len(sizes))
    member_group = np.repeat(np.arange(len(sizes)), sizes)
    alive = kept_owners[member_group] > 0
    indptr = np.r_[0, np.cumsum(kept_owners)]
    owners = groups.owners[keep]
    members, of = groups.members[alive], member_group[alive]
    widths = kept_owners[of]
    record = np.repeat(members, widths)
    offset = np.arange(len(record)) - np.repeat(np.r_[0, np.cumsum(widths)][:-1], widths)
    user = owners[np.repeat(indptr[:-1][of], widths) + offset]
    highest = int(groups.members.max(initial=-1)) + 1
    return merge_identical(record, user, np.ones(highest, dtype=np.int64))


def _spread(groups: Groups, copies: Ints, multiplicity: Ints) -> None:
    """Share each group's copies evenly among its records. The first records get the remainder."""
    sizes = groups.sizes
    position = np.arange(len(groups.members)) - np.repeat(groups.starts[:-1], sizes)
    each, left_over = np.repeat(copies // sizes, sizes), np.repeat(copies % sizes, sizes)
    multiplicity[groups.members] += each + (position < left_over)


def _solve(
    groups: Groups, worth: Ints, *, free: Ints, most: Ints, deadline: float
) -> tuple[Ints, int]:
    """Solve for the copies of each group, at most `most`; also return a bound on their worth."""
    if len(worth) == 0:
        return np.empty(0, dtype=np.int64), 0
    users, row = np.unique(groups.owners, return_inverse=True)
    width = np.diff(groups.indptr)
    most = np.minimum(most, np.minimum.reduceat(free[groups.owners], groups.indptr[:-1]))
    bound = places_bound(worth, width, most, places=int(free[users].sum()))
    solved = maximise(
        worth,
        rows=row.reshape(-1),
        columns=np.repeat(np.arange(len(width)), width),
        entries=np.ones(len(row), dtype=np.int64),
        lower=np.full(len(users), -np.inf),
        upper=free[users].astype(np.float64),
        most=most,
        time_limit=deadline - time.monotonic(),
    )
    if solved.upper_bound is not None:
        bound = min(bound, solved.upper_bound)
    copies = np.zeros(len(worth), dtype=np.int64) if solved.values is None else solved.values
    return copies, bound


def places_bound(worth: Ints, width: Ints, most: Ints, *, places: int) -> int:
    """An upper bound on the worth of a selection, by counting places.

    All users together have `places`, and a record uses `width` of them. The bound is the fractional
    knapsack over the records by worth per place, each at most `most` times.

    >>> one = np.ones(3, dtype=np.int64)
    >>> places_bound(one, np.array([1, 2, 2]), one, places=4)
    2
    """
    order = np.argsort(-(worth / width), kind="stable")
    used = np.cumsum((width * most)[order])
    whole = int(np.searchsorted(used, places, side="right"))
    total = int((worth * most)[order[:whole]].sum())
    if whole < len(order):
        left = places - (int(used[whole - 1]) if whole else 0)
        total += left * int(worth[order[whole]]) // int(width[order[whole]])
    return total


def size_bound(edges: Edges, max_records_per_user: int, *, duplicates: bool = False) -> int:
    """An upper bound on the size of any selection. It takes one sort and is often far from tight.

    >>> size_bound(Edges.from_lists([[0], [0], [0, 1]], num_users=2), 1)
    2
    """
    degrees = edges.degrees()
    limit = max_records_per_user if duplicates else 1
    places = np.minimum(degrees * limit, max_records_per_user)
    ones = np.ones(edges.num_records, dtype=np.int64)
    return places_bound(ones, edges.cardinality(), limit * ones, places=int(places.sum()))


def _best(candidates: list[Ints], worth: Ints, *, upper_bound: int, residual: int) -> Optimum:
    """The heaviest of the candidates."""
    values = [int(worth @ multiplicity) for multiplicity in candidates]
    best = int(np.argmax(values))
    return Optimum(
        multiplicity=candidates[best],
        value=values[best],
        upper_bound=upper_bound,
        residual=residual,
    )


def _deadline(time_limit: float) -> float:
    if not time_limit > 0:
        raise InputError(f"time_limit={time_limit}: give the solver a positive number of seconds.")
    return time.monotonic() + time_limit
