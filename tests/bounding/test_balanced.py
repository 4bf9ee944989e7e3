from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bounding import graphs
from userdp.bounding import balanced, greedy
from userdp.bounding.edges import Edges
from userdp.errors import InputError

alternations = st.builds(
    balanced.Alternation,
    few_owners=st.integers(1, 4),
    few_run=st.integers(1, 10),
    many_run=st.integers(1, 10),
)


def plain_alternation(graph: Edges, alternation: balanced.Alternation) -> list[int]:
    """Sec. 5.5 as described: c1 from the small ones, c2 from the large ones, and so on."""
    rows = graphs.owners_of(graph)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    few = [i for i in order if len(rows[i]) <= alternation.few_owners]
    many = [i for i in order if len(rows[i]) > alternation.few_owners]
    visited: list[int] = []
    while few or many:
        visited += few[: alternation.few_run] + many[: alternation.many_run]
        few, many = few[alternation.few_run :], many[alternation.many_run :]
    return visited


@given(graphs.edges(max_records=30), alternations, st.integers(1, 3))
def test_the_alternation_is_the_one_described(
    graph: Edges, alternation: balanced.Alternation, bound: int
) -> None:
    order = balanced.alternating_order(graph, alternation)
    assert order.tolist() == plain_alternation(graph, alternation)
    found = balanced.balanced(graph, bound, alternation)
    assert graphs.fits(graph, found, bound)
    for record in np.flatnonzero(found == 0):
        more = found.copy()
        more[record] = 1
        assert not graphs.fits(graph, more, bound)


def test_the_grid_has_the_papers_80_settings() -> None:
    assert len(balanced.GRID) == 80
    assert {a.few_owners for a in balanced.GRID} == {1, 2, 3, 4}
    assert all(min(a.few_run, a.many_run) == 1 for a in balanced.GRID)
    assert {max(a.few_run, a.many_run) for a in balanced.GRID} == set(range(1, 11))


@settings(max_examples=30, deadline=None)
@given(graphs.edges(max_users=10, max_records=40))
def test_no_point_of_the_grid_dominates_one_of_the_front(graph: Edges) -> None:
    points = balanced.grid(graph, 2)
    front = balanced.pareto_front(points)
    assert front
    for kept in front:
        for other in points:
            at_least = (
                other.size >= kept.size
                and other.mean_users_per_record >= kept.mean_users_per_record
            )
            better = (
                other.size > kept.size or other.mean_users_per_record > kept.mean_users_per_record
            )
            assert not (at_least and better)
    sizes = [point.size for point in front]
    means = [point.mean_users_per_record for point in front]
    assert sizes == sorted(set(sizes), reverse=True)
    assert means == sorted(set(means))


def test_balancing_raises_the_mean_number_of_owners() -> None:
    graph = Edges.from_lists([[0]] * 5 + [[1]] * 5 + [[0, 1]] * 5, num_users=2)
    plain = greedy.greedy(graph, 4)
    even = balanced.balanced(graph, 4, balanced.Alternation(few_owners=1, many_run=10))
    cardinality = graph.cardinality()
    assert (cardinality @ even) / even.sum() > (cardinality @ plain) / plain.sum()
    assert even.sum() < plain.sum()


def test_random_baselines_draw_from_the_right_records_and_ignore_the_bound() -> None:
    graph = Edges.from_lists([[0]] * 6 + [[0, 1, 2]] * 4, num_users=3)
    rng = np.random.default_rng(0)
    low = balanced.unbounded_random(graph, 6, rng=rng, among=balanced.Baseline.LOW)
    high = balanced.unbounded_random(graph, 6, rng=rng, among=balanced.Baseline.HIGH)
    anything = balanced.unbounded_random(graph, 6, rng=rng)
    assert low.tolist() == [1] * 6 + [0] * 4
    assert high.tolist() == [0] * 6 + [1] * 4
    assert (anything.sum(), anything.max()) == (6, 1)
    assert graph.contributions(low).max() == 6


@pytest.mark.parametrize("field", ["few_owners", "few_run", "many_run"])
def test_runs_below_one_are_refused(field: str) -> None:
    with pytest.raises(InputError, match=field):
        balanced.Alternation(**({"few_owners": 1} | {field: 0}))
