"""The table of methods: the name of each, and the function that selects records by it.

A new method is one function here and its name in `names.py`. Methods see the owners of records
alone. The exceptions are the four that choose by text: they refuse records with several owners.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from userdp.bounding import balanced, exact, greedy, min_sep, rounds
from userdp.bounding.edges import Edges, Ints
from userdp.bounding.names import Method, Weight, Where
from userdp.data.engine import EngineName
from userdp.data.select import best_records, check_single_owners
from userdp.data.store import UserStore
from userdp.errors import InputError

# Given a store, the mean loss of each of its records under a public model.
Losses = Callable[[UserStore], NDArray[np.float64]]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to bound, and every choice that some method has. `bound` explains them."""

    source: Path | None
    edges: Edges
    max_records_per_user: int | None
    method: Method
    engine: Where
    finish_below: int | None
    weight: Weight
    time_limit: float
    few_owners: int
    few_run: int
    many_run: int
    grid: bool
    steps: int | None
    batch_size: int | None
    separation: int | None
    losses: Losses | None
    seed: int | None

    @property
    def k(self) -> int:
        """The bound, for all methods that need one."""
        assert self.max_records_per_user is not None
        return self.max_records_per_user

    def rng(self) -> np.random.Generator:
        """The source of a random choice, from the system's entropy unless a seed is given.

        Under fixed-graph privacy the selected records are public, like the graph. Entropy by
        default means that nobody can plan for the draw.
        """
        return np.random.default_rng(secrets.randbits(128) if self.seed is None else self.seed)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A selection, and what the method knows about it."""

    multiplicity: Ints
    bound: int
    guarantee: bool = True
    optimal: bool | None = None
    upper_bound: int | None = None
    batches: Ints | None = None
    separation: int | None = None
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


def _greedy(task: Task) -> Found:
    if task.engine is not Where.LOCAL:
        return _in_rounds(task)
    if task.weight is Weight.OWNERS:
        owners = task.edges.cardinality()
        multiplicity = greedy.greedy_weighted(task.edges, owners, task.k)
        extra = {"value": int(owners @ multiplicity)}
        return Found(multiplicity=multiplicity, bound=task.k, extra=extra)
    return _sized(task, greedy.greedy(task.edges, task.k))


def _in_rounds(task: Task) -> Found:
    done = rounds.greedy_rounds(
        task.edges,
        task.k,
        engine=EngineName(task.engine.value),
        finish_below=rounds.FINISH_BELOW if task.finish_below is None else task.finish_below,
    )
    return _sized(
        task,
        done.multiplicity,
        rounds=done.rounds,
        shuffles=done.shuffles,
        undecided=list(done.undecided),
        finished_in_memory=done.finished,
        held_bytes=done.held_bytes,
    )


def _greedy_duplicates(task: Task) -> Found:
    return _sized(task, greedy.greedy_duplicates(task.edges, task.k), duplicates=True)


def _random(task: Task) -> Found:
    return _sized(task, greedy.greedy_random_order(task.edges, task.k, rng=task.rng()))


def _balanced(task: Task) -> Found:
    alternation = balanced.Alternation(
        few_owners=task.few_owners, few_run=task.few_run, many_run=task.many_run
    )
    multiplicity = balanced.balanced(task.edges, task.k, alternation)
    if not task.grid:
        return _sized(task, multiplicity)
    front = [
        asdict(point.alternation)
        | {"size": point.size, "mean_users_per_record": point.mean_users_per_record}
        for point in balanced.pareto_front(balanced.grid(task.edges, task.k))
    ]
    return _sized(task, multiplicity, front=front)


def _sized(task: Task, multiplicity: Ints, *, duplicates: bool = False, **extra: Any) -> Found:
    """Compare a selection with a cheap upper bound on the size of any selection."""
    upper = exact.size_bound(task.edges, task.k, duplicates=duplicates)
    return Found(
        multiplicity=multiplicity,
        bound=task.k,
        upper_bound=upper,
        optimal=int(multiplicity.sum()) == upper,
        extra=extra,
    )


def _exact(task: Task) -> Found:
    weights = task.edges.cardinality() if task.weight is Weight.OWNERS else None
    return _proven(
        task, exact.exact(task.edges, task.k, weights=weights, time_limit=task.time_limit)
    )


def _exact_duplicates(task: Task) -> Found:
    return _proven(task, exact.exact_duplicates(task.edges, task.k, time_limit=task.time_limit))


def _proven(task: Task, best: exact.Optimum) -> Found:
    return Found(
        multiplicity=best.multiplicity,
        bound=task.k,
        optimal=best.optimal,
        upper_bound=best.upper_bound,
        extra={"value": best.value, "residual": best.residual},
    )


def _min_separation(task: Task) -> Found:
    if task.steps is None or task.batch_size is None:
        raise InputError("min-separation needs --steps and --batch-size.")
    shape = {"steps": task.steps, "batch_size": task.batch_size}
    separation = task.separation
    if separation is None:
        # If nothing fits, a separation of 1 fails below and says why.
        separation = max(1, min_sep.largest_separation(task.edges, **shape))
    found = min_sep.min_separation(task.edges, **shape, separation=separation)
    k = task.max_records_per_user
    if k is not None and found.realised_bound > k:
        raise InputError(
            f"at separation {separation} a user owns {found.realised_bound} records, more than "
            f"--max-records-per-user {k}. Raise the separation or the bound, or take fewer steps."
        )
    return Found(
        multiplicity=found.multiplicity(task.edges.num_records),
        bound=found.realised_bound if k is None else k,
        batches=found.batches,
        separation=separation,
    )


def _by_length(sign: float, task: Task) -> Found:
    store = _store_of(task)
    return _highest(task, store, sign * store.bytes_per_record().astype(float))


def _by_perplexity(sign: float, task: Task) -> Found:
    assert task.losses is not None
    store = _store_of(task)
    scores = sign * task.losses(store)
    # A record in which nothing is predicted has no perplexity, and comes last either way.
    scores[np.isnan(scores)] = -np.inf
    return _highest(task, store, scores)


def _store_of(task: Task) -> UserStore:
    if task.source is None or not task.source.is_dir():
        raise InputError(
            f"--method {task.method.value} chooses by what records say, and "
            f"{task.source or 'the source'} holds owners only: give the store's directory, or a "
            "method such as greedy."
        )
    store = UserStore.open(task.source)
    check_single_owners(store)
    return store


def _highest(task: Task, store: UserStore, scores: NDArray[np.float64]) -> Found:
    multiplicity = best_records(store, scores, at_most=task.k)
    # Every user keeps as many records as the bound allows.
    size = int(multiplicity.sum())
    return Found(multiplicity=multiplicity, bound=task.k, upper_bound=size, optimal=True)


def _unbounded(among: balanced.Baseline, task: Task) -> Found:
    size = int(greedy.greedy(task.edges, task.k).sum())
    multiplicity = balanced.unbounded_random(task.edges, size, rng=task.rng(), among=among)
    return Found(multiplicity=multiplicity, bound=task.k, guarantee=False)


METHODS: dict[Method, Callable[[Task], Found]] = {
    Method.GREEDY: _greedy,
    Method.GREEDY_DUPLICATES: _greedy_duplicates,
    Method.EXACT: _exact,
    Method.EXACT_DUPLICATES: _exact_duplicates,
    Method.BALANCED: _balanced,
    Method.MIN_SEPARATION: _min_separation,
    Method.RANDOM: _random,
    Method.LONGEST: partial(_by_length, 1.0),
    Method.SHORTEST: partial(_by_length, -1.0),
    Method.HIGHEST_PERPLEXITY: partial(_by_perplexity, 1.0),
    Method.LOWEST_PERPLEXITY: partial(_by_perplexity, -1.0),
    Method.UNBOUNDED_RANDOM: partial(_unbounded, balanced.Baseline.ANY),
    Method.UNBOUNDED_RANDOM_LOW: partial(_unbounded, balanced.Baseline.LOW),
    Method.UNBOUNDED_RANDOM_HIGH: partial(_unbounded, balanced.Baseline.HIGH),
}
