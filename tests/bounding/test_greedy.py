from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bounding import graphs
from userdp.bounding import greedy
from userdp.bounding.edges import Edges
from userdp.errors import InputError

bounds = st.integers(1, 4)


@given(graphs.edges(), bounds)
def test_greedy_is_algorithm_2_as_printed(graph: Edges, bound: int) -> None:
    assert greedy.greedy(graph, bound).tolist() == graphs.plain_greedy(graph, bound)


@given(graphs.edges(), bounds)
def test_greedy_with_duplicates_is_algorithm_3_as_printed(graph: Edges, bound: int) -> None:
    found = greedy.greedy_duplicates(graph, bound)
    assert found.tolist() == graphs.plain_greedy(graph, bound, duplicates=True)


@given(graphs.edges(), bounds, st.integers(0, 2**32 - 1))
def test_the_bound_holds_in_any_order_and_nothing_can_be_added(
    graph: Edges, bound: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    for found in (
        greedy.greedy(graph, bound),
        greedy.greedy_random_order(graph, bound, rng=rng),
        greedy.greedy_weighted(graph, graph.cardinality(), bound),
    ):
        assert graphs.fits(graph, found, bound)
        for record in np.flatnonzero(found == 0):
            more = found.copy()
            more[record] = 1
            assert not graphs.fits(graph, more, bound)


@given(graphs.edges(), bounds)
def test_no_copy_can_be_added_to_greedy_with_duplicates(graph: Edges, bound: int) -> None:
    found = greedy.greedy_duplicates(graph, bound)
    assert graphs.fits(graph, found, bound)
    for record in range(graph.num_records):
        more = found.copy()
        more[record] += 1
        assert not graphs.fits(graph, more, bound)


@given(graphs.edges(max_records=30), bounds)
def test_duplicates_have_the_support_of_the_greedy_selection(graph: Edges, bound: int) -> None:
    with_copies = greedy.greedy_duplicates(graph, bound)
    assert ((with_copies > 0) == (greedy.greedy(graph, bound) > 0)).all()


@given(graphs.edges())
def test_equal_weights_are_no_weights(graph: Edges) -> None:
    weights = np.full(graph.num_records, 7)
    assert greedy.greedy_weighted(graph, weights, 2).tolist() == greedy.greedy(graph, 2).tolist()


def test_bounds_past_a_byte_are_kept() -> None:
    graph = Edges.from_lists([[0]] * 400, num_users=1)
    assert [greedy.greedy(graph, k).sum() for k in (255, 256, 300)] == [255, 256, 300]


def test_copies_of_the_papers_example() -> None:
    # Ganesh et al. 2025, Sec. 5.2: users A to D, k = 3; at most 4 without duplicates, 5 with.
    a, b, c, d = range(4)
    graph = Edges.from_lists([[a], [a, b], [a, c], [b, c], [a, d]], num_users=4)
    assert greedy.greedy(graph, 3).sum() == 4
    assert greedy.greedy_duplicates(graph, 3).sum() >= 5


@pytest.mark.parametrize("bound", [0, -1, 1_000_001, 10**30])
def test_a_bound_of_no_use_is_refused(bound: int) -> None:
    graph = Edges.from_lists([[0]], num_users=1)
    for method in (greedy.greedy, greedy.greedy_duplicates):
        with pytest.raises(InputError, match=r"Use 1 or more|give at most 1,000,000"):
            method(graph, bound)


@pytest.mark.parametrize("weights", [[1], [0, 1], [-1, 1], [1.5, 1.0], [1, 2_000_000]])
def test_bad_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(InputError, match="weights"):
        greedy.greedy_weighted(Edges.from_lists([[0], [0]], num_users=1), weights, 1)
