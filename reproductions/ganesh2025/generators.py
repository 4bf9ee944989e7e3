"""Synthetic graphs of owners and data on them, for experiments on contribution bounding.

The two graph models and the logistic-regression data of Ganesh et al. 2025 (App. C.1). The paper
draws a record's number of owners from a Poisson distribution, which is zero for one record in seven
at a mean of 2; a record without owners has nobody to protect, so here the Poisson is conditioned on
at least one, with its rate chosen to keep the mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from userdp.bounding.edges import Edges, Ints, Owners
from userdp.compiled import compiled
from userdp.errors import InputError

Floats = NDArray[np.float64]


def regular_graph(
    *,
    num_records: int,
    mean_owners: float = 2.0,
    mean_records: float,
    rng: np.random.Generator,
) -> Edges:
    """A probabilistic regular graph: each record's owners are uniform among all users.

    |E| = `num_records`, E|e| = `mean_owners`, d_u = `mean_records` a user; the number of users is
    |E| E|e| / d_u. Reference: Ganesh et al. 2025, App. C.1.

    >>> edges = regular_graph(num_records=1000, mean_records=4.0, rng=np.random.default_rng(0))
    >>> edges.num_records, edges.num_users
    (1000, 500)
    """
    indptr, owners, num_users = _empty_graph(num_records, mean_owners, mean_records, rng)
    _choose_uniform(indptr, owners, num_users, rng)
    return Edges(indptr=indptr, owners=owners, num_users=num_users)


def skewed_graph(
    *,
    num_records: int,
    mean_owners: float = 2.0,
    mean_records: float,
    alpha: float = 1.5,
    rng: np.random.Generator,
) -> Edges:
    """A skewed graph: a record goes to users in proportion to (1 + records so far)^alpha.

    Records are attributed one after the other, to distinct users. alpha = 0 is the regular graph;
    the larger, the more skewed. Reference: Ganesh et al. 2025, App. C.1 (alpha = 1.5).

    >>> edges = skewed_graph(num_records=1000, mean_records=4.0, rng=np.random.default_rng(0))
    >>> bool(edges.degrees().max() > 50)
    True
    """
    if not alpha >= 0:
        raise InputError(f"alpha={alpha}: use 0 or more.")
    indptr, owners, num_users = _empty_graph(num_records, mean_owners, mean_records, rng)
    _choose_skewed(indptr, owners, num_users, alpha, rng)
    return Edges(indptr=indptr, owners=owners, num_users=num_users)


@dataclass(frozen=True, kw_only=True, eq=False)
class LogisticData:
    """A feature vector and a label for each record, and the two vectors behind the labels."""

    features: Floats
    labels: NDArray[np.int8]
    base: Floats
    bias: Floats


def logistic_data(
    edges: Edges,
    *,
    dimension: int,
    bias_strength: float = 1.0,
    steepness: float = 20.0,
    rng: np.random.Generator,
) -> LogisticData:
    """Records whose labels depend on their number of owners, the more the larger `bias_strength`.

    y ~ Bernoulli(sigmoid(k1 <2 / (1 + k) (a + k |e| b), z>)), with k = `bias_strength`,
    k1 = `steepness`, z the features. a, b and z are Gaussian with mean squared norm 1, so their
    variance is 1 / d a coordinate (the paper prints 1 / sqrt(d), which would not give that norm).
    Reference: Ganesh et al. 2025, App. C.1.

    >>> edges = Edges.from_lists([[0], [0, 1]], num_users=2)
    >>> logistic_data(edges, dimension=3, rng=np.random.default_rng(0)).features.shape
    (2, 3)
    """
    if dimension < 1 or not bias_strength >= 0:
        raise InputError(
            f"dimension={dimension}, bias_strength={bias_strength}: use at least 1 and 0."
        )
    scale = 1 / np.sqrt(dimension)
    base = rng.normal(scale=scale, size=dimension)
    bias = rng.normal(scale=scale, size=dimension)
    features = rng.normal(scale=scale, size=(edges.num_records, dimension))
    strength = bias_strength * edges.cardinality()
    logits = 2 / (1 + bias_strength) * (features @ base + strength * (features @ bias))
    # tanh does not overflow where exp would: sigmoid(x) = (1 + tanh(x / 2)) / 2.
    probability = (1 + np.tanh(steepness * logits / 2)) / 2
    labels = (rng.random(edges.num_records) < probability).astype(np.int8)
    return LogisticData(features=features, labels=labels, base=base, bias=bias)


def _empty_graph(
    num_records: int, mean_owners: float, mean_records: float, rng: np.random.Generator
) -> tuple[Ints, NDArray[np.int32], int]:
    """Room for the owners of each record, and the number of users."""
    if num_records < 1 or not mean_owners >= 1 or not mean_records > 0:
        raise InputError(
            f"num_records={num_records}, mean_owners={mean_owners}, mean_records={mean_records}: "
            "use at least 1 record, 1 owner and a positive number of records a user."
        )
    num_users = max(1, round(num_records * mean_owners / mean_records))
    counts = np.minimum(_positive_poisson(mean_owners, num_records, rng), num_users)
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return indptr, np.empty(int(indptr[-1]), dtype=np.int32), num_users


def _positive_poisson(mean: float, size: int, rng: np.random.Generator) -> Ints:
    """Poisson counts conditioned on at least 1, with the given mean."""
    if mean == 1:
        return np.ones(size, dtype=np.int64)
    # E[X | X >= 1] = rate / (1 - exp(-rate)), increasing in the rate and above it: bisect.
    low, high = 0.0, mean
    for _ in range(100):
        rate = (low + high) / 2
        low, high = (rate, high) if rate < -mean * math.expm1(-rate) else (low, rate)
    rate = high
    # Counts from 1 on, each probability from the one before, until nothing is left in floating
    # point.
    most = math.ceil(rate + 12 * math.sqrt(rate) + 40)
    ratios: Floats = np.r_[
        rate * math.exp(-rate) / -math.expm1(-rate), rate / np.arange(2, most + 1)
    ]
    cdf = np.cumsum(np.cumprod(ratios))
    return 1 + np.minimum(np.searchsorted(cdf, rng.random(size), side="right"), most - 1)


@compiled
def _choose_uniform(indptr: Ints, owners: Owners, num_users: int, rng: np.random.Generator) -> None:
    for record in range(len(indptr) - 1):
        for at in range(indptr[record], indptr[record + 1]):
            before = -1
            while before < at:
                owners[at] = min(int(rng.random() * num_users), num_users - 1)
                before = indptr[record]
                while before < at and owners[before] != owners[at]:
                    before += 1


@compiled
def _choose_skewed(
    indptr: Ints, owners: Owners, num_users: int, alpha: float, rng: np.random.Generator
) -> None:
    # Users with the same number of records d have the same weight (1 + d)^alpha, so a draw picks d
    # by a tree of sums and then a user of that d uniformly. `by_degree` lists the users by d, those
    # of d from start[d] on: one more record moves a user over one boundary.
    records = len(indptr) - 1
    leaves = 1
    while leaves < records + 2:
        leaves *= 2
    tree = np.zeros(2 * leaves, dtype=np.float64)
    by_degree = np.arange(num_users)
    position = np.arange(num_users)
    degree = np.zeros(num_users, dtype=np.int64)
    chosen_for = np.full(num_users, -1, dtype=np.int64)
    start = np.full(records + 3, num_users, dtype=np.int64)
    start[0] = 0
    free = np.zeros(records + 2, dtype=np.int64)
    free[0] = num_users
    node = leaves
    while node > 0:
        tree[node] = num_users
        node >>= 1

    for record in range(records):
        for at in range(indptr[record], indptr[record + 1]):
            while True:
                target = rng.random() * tree[1]
                node = 1
                while node < leaves:
                    node *= 2
                    if target >= tree[node] and tree[node + 1] > 0:
                        target -= tree[node]
                        node += 1
                group = node - leaves
                # Rounding may point at a group just emptied: draw again.
                if group <= records and free[group] > 0:
                    break
            width = start[group + 1] - start[group]
            while True:
                user = by_degree[start[group] + min(int(rng.random() * width), width - 1)]
                if chosen_for[user] != record:
                    break
            owners[at] = user
            chosen_for[user] = record
            last = start[group + 1] - 1
            other = by_degree[last]
            by_degree[position[user]], by_degree[last] = other, user
            position[other], position[user] = position[user], last
            start[group + 1] -= 1
            degree[user] = group + 1
            # A chosen user weighs nothing for the rest of this record: owners are distinct.
            free[group] -= 1
            _set_sum(tree, group, free[group] * (1.0 + group) ** alpha)
        for at in range(indptr[record], indptr[record + 1]):
            group = int(degree[owners[at]])
            free[group] += 1
            _set_sum(tree, group, free[group] * (1.0 + group) ** alpha)


@compiled
def _set_sum(tree: Floats, position: int, value: float) -> None:
    node = position + len(tree) // 2
    tree[node] = value
    node >>= 1
    while node > 0:
        tree[node] = tree[2 * node] + tree[2 * node + 1]
        node >>= 1
