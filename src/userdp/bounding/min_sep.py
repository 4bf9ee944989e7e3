"""Batches in which each user's records keep a minimum distance, for matrix-factorisation noise.

A selection satisfies (k, b)-min-separation if every user owns at most one record in any b
consecutive batches, and at most k in all. Correlated noise is then a Gaussian mechanism with noise
multiplier sigma / sqrt(k) (Ganesh et al. 2025, Sec. 3.1). T = `steps`, B = `batch_size`, b =
`separation`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from userdp.bounding.edges import Edges, Ints, Owners
from userdp.bounding.greedy import Order, by_cardinality
from userdp.compiled import compiled
from userdp.errors import InputError


@dataclass(frozen=True, kw_only=True, eq=False)
class Separated:
    """`batches[t]` holds the record numbers of step t; no user owns more than `realised_bound`."""

    batches: Ints
    separation: int
    realised_bound: int

    def multiplicity(self, num_records: int) -> Ints:
        """How often each record occurs."""
        return np.bincount(self.batches.reshape(-1), minlength=num_records)


def min_separation(edges: Edges, *, steps: int, batch_size: int, separation: int) -> Separated:
    """Fill T batches of B records, going round the records by number of owners (Alg. 4).

    Guarantee: no user owns two records in any b consecutive batches. The realised contribution
    bound, at most ceil(T / b), is counted afterwards and returned. If the batches cannot be filled,
    it raises `InputError` and names the largest separation that works.
    Reference: Ganesh et al. 2025, Alg. 4.

    >>> edges = Edges.from_lists([[0], [1], [0, 1], [2]], num_users=3)
    >>> found = min_separation(edges, steps=3, batch_size=1, separation=3)
    >>> found.batches.tolist(), found.realised_bound
    ([[0], [1], [3]], 1)
    """
    check_shape(steps, batch_size, separation)
    batches = _fill(edges, steps, batch_size, separation)
    if batches is None:
        largest = largest_separation(edges, steps=steps, batch_size=batch_size)
        if largest == 0:
            raise InputError(
                f"no {steps} batches of {batch_size} records can be filled at any separation: a "
                "batch holds at most one record of each user. Use a smaller batch, or more users."
            )
        raise InputError(
            f"separation={separation} is out of reach for {steps} batches of {batch_size} records: "
            f"{largest} is the largest found. Use that, fewer records a batch, or more users."
        )
    return Separated(
        batches=batches, separation=separation, realised_bound=count_bound(edges, batches)
    )


def largest_separation(edges: Edges, *, steps: int, batch_size: int) -> int:
    """A separation that works for Algorithm 4 while the next larger does not; 0 if none works.

    It is found by doubling and bisection. In theory the greedy algorithm is not monotone, so a
    still larger separation may happen to work. Separations above T have no meaning.
    """
    check_shape(steps, batch_size, 1)
    works, fails = 0, 1
    while fails <= steps and _fill(edges, steps, batch_size, fails) is not None:
        works, fails = fails, 2 * fails
    fails = min(fails, steps + 1)
    while fails - works > 1:
        middle = (works + fails) // 2
        if _fill(edges, steps, batch_size, middle) is None:
            fails = middle
        else:
            works = middle
    return works


def count_bound(edges: Edges, batches: Ints) -> int:
    """The most records that any user owns in these batches, copies counted."""
    counts = np.bincount(batches.reshape(-1), minlength=edges.num_records)
    return int(edges.contributions(counts).max(initial=0))


def check_shape(steps: int, batch_size: int, separation: int) -> None:
    """Refuse batches without steps, records or distance."""
    for name, value in (
        ("steps", steps),
        ("batch_size", batch_size),
        ("separation", separation),
    ):
        if value < 1:
            raise InputError(f"{name}={value}: use 1 or more.")


def _fill(edges: Edges, steps: int, batch_size: int, separation: int) -> Ints | None:
    if batch_size > edges.num_records:
        return None
    # A user who never took part is ready at step 0, so the last step counts as b before it.
    last = np.full(edges.num_users, -min(separation, steps), dtype=np.int64)
    flat = np.empty(steps * batch_size, dtype=np.int64)
    ready = _ready_tree(edges.num_records)
    order = by_cardinality(edges)
    filled = _go_round(
        edges.indptr, edges.owners, order, last, ready, flat, batch_size, min(separation, steps)
    )
    return flat.reshape(steps, batch_size) if filled == len(flat) else None


def _ready_tree(num_records: int) -> Ints:
    """A tree of minima over the steps at which records, in order of visit, may be ready."""
    leaves = 1
    while leaves < num_records:
        leaves *= 2
    tree = np.zeros(2 * leaves, dtype=np.int64)
    tree[leaves + num_records :] = np.iinfo(np.int64).max
    while leaves > 1:
        below = tree[leaves : 2 * leaves]
        leaves //= 2
        tree[leaves : 2 * leaves] = np.minimum(below[::2], below[1::2])
    return tree


@compiled
def _next_ready(tree: Ints, start: int, step: int) -> int:
    """The first position at or after `start` whose record may be ready at `step`; -1 if none is."""
    leaves = len(tree) // 2
    node = start + leaves
    if tree[node] > step:
        # Climb until a right sibling holds something ready, then go down to its first leaf.
        while True:
            if node & (node + 1) == 0:
                return -1
            if node & 1 == 0 and tree[node + 1] <= step:
                node += 1
                break
            node >>= 1
        while node < leaves:
            node *= 2
            if tree[node] > step:
                node += 1
    return node - leaves


@compiled
def _set_ready(tree: Ints, position: int, step: int) -> None:
    node = position + len(tree) // 2
    tree[node] = step
    node >>= 1
    while node > 0:
        tree[node] = min(tree[2 * node], tree[2 * node + 1])
        node >>= 1


@compiled
def _go_round(
    indptr: Ints,
    owners: Owners,
    order: Order,
    last: Ints,
    tree: Ints,
    flat: Ints,
    batch_size: int,
    separation: int,
) -> int:
    # Algorithm 4 tests every record again in every round. Owners' last steps only grow. So when a
    # record fails, we know a step before which it cannot pass, and the tree skips it until then.
    records = len(order)
    position = 0
    for filled in range(len(flat)):
        step = filled // batch_size
        while True:
            found = _next_ready(tree, position, step) if position < records else -1
            if found < 0:
                found = _next_ready(tree, 0, step)
            if found < 0:
                return filled
            record = order[found]
            ready = 0
            for at in range(indptr[record], indptr[record + 1]):
                ready = max(ready, int(last[owners[at]]) + separation)
            position = found + 1
            if ready <= step:
                break
            _set_ready(tree, found, ready)
        for at in range(indptr[record], indptr[record + 1]):
            last[owners[at]] = step
        _set_ready(tree, found, step + separation)
        flat[filled] = record
    return len(flat)
