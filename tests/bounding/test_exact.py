from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bounding import graphs
from reproductions.ganesh2025 import generators
from userdp.bounding import exact, greedy
from userdp.bounding.edges import Edges
from userdp.errors import InputError

bounds = st.integers(1, 3)


@settings(max_examples=150, deadline=None)
@given(graphs.edges(max_users=5, max_records=9), bounds)
def test_exact_matches_brute_force(graph: Edges, bound: int) -> None:
    best = exact.exact(graph, bound)
    ones = [1] * graph.num_records
    assert best.optimal
    assert best.value == best.multiplicity.sum()
    assert best.value == graphs.brute_force(graph, bound, ones, most=1)
    assert best.multiplicity.max(initial=0) <= 1
    assert graphs.fits(graph, best.multiplicity, bound)


@settings(max_examples=100, deadline=None)
@given(graphs.edges(max_users=5, max_records=8), bounds, st.data())
def test_weighted_exact_matches_brute_force(graph: Edges, bound: int, data: st.DataObject) -> None:
    some = st.lists(st.integers(1, 9), min_size=graph.num_records, max_size=graph.num_records)
    weights = data.draw(some)
    best = exact.exact(graph, bound, weights=np.array(weights, dtype=np.int64))
    assert best.optimal
    assert best.value == graphs.brute_force(graph, bound, weights, most=1)
    assert best.value == np.array(weights, dtype=np.int64) @ best.multiplicity
    assert graphs.fits(graph, best.multiplicity, bound)


@settings(max_examples=100, deadline=None)
@given(graphs.edges(max_users=5, max_records=5), bounds)
def test_exact_with_duplicates_matches_brute_force(graph: Edges, bound: int) -> None:
    best = exact.exact_duplicates(graph, bound)
    assert best.optimal
    assert best.value == best.multiplicity.sum()
    assert best.value == graphs.brute_force(graph, bound, [1] * graph.num_records, most=bound)
    assert graphs.fits(graph, best.multiplicity, bound)


@settings(max_examples=50, deadline=None)
@given(graphs.edges(max_users=12, max_records=40), bounds)
def test_exact_is_between_greedy_and_the_cheap_bound(graph: Edges, bound: int) -> None:
    best, copies = exact.exact(graph, bound), exact.exact_duplicates(graph, bound)
    assert greedy.greedy(graph, bound).sum() <= best.value <= exact.size_bound(graph, bound)
    assert best.value <= copies.value <= exact.size_bound(graph, bound, duplicates=True)
    assert greedy.greedy_duplicates(graph, bound).sum() <= copies.value


@pytest.mark.parametrize("bound", [1, 2])
def test_exact_proves_random_graphs_that_no_rule_reduces_away(bound: int) -> None:
    rng = np.random.default_rng(7)
    graph = generators.regular_graph(num_records=2000, mean_owners=3.0, mean_records=4.0, rng=rng)
    best = exact.exact(graph, bound)
    assert best.optimal
    assert best.residual > 100
    assert graphs.fits(graph, best.multiplicity, bound)
    assert best.value >= greedy.greedy(graph, bound).sum()


@pytest.mark.parametrize("solve", [exact.exact, exact.exact_duplicates])
def test_out_of_time_gives_a_bounded_selection_no_worse_than_greedy_and_a_gap(solve) -> None:
    rng = np.random.default_rng(1)
    graph = generators.regular_graph(num_records=40_000, mean_owners=4.0, mean_records=8.0, rng=rng)
    start = time.process_time()
    best = solve(graph, 2, time_limit=0.2)
    # HiGHS looks at the clock between its phases, not within them. Processor time: others may share
    # the machine.
    assert time.process_time() - start < 15
    assert graph.contributions(best.multiplicity).max() <= 2
    baseline = greedy.greedy if solve is exact.exact else greedy.greedy_duplicates
    assert baseline(graph, 2).sum() <= best.value <= best.upper_bound
    assert not best.optimal


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_time_limit_that_is_none_is_refused(limit: float) -> None:
    graph = Edges.from_lists([[0]], num_users=1)
    with pytest.raises(InputError, match="time_limit"):
        exact.exact(graph, 1, time_limit=limit)
