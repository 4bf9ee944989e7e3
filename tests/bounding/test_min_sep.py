from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bounding import graphs
from reproductions.ganesh2025 import generators
from userdp.bounding import min_sep
from userdp.bounding.edges import Edges
from userdp.errors import InputError

shapes = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 6))


def plain_algorithm_4(
    graph: Edges, steps: int, batch_size: int, separation: int
) -> list[int] | None:
    """Algorithm 4 as printed, testing every record again on every round."""
    rows = graphs.owners_of(graph)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    last: dict[int, int] = {}
    selected: list[int] = []
    idle = position = 0
    while len(selected) < steps * batch_size:
        if idle == len(rows):
            return None
        record = order[position % len(rows)]
        position += 1
        step = len(selected) // batch_size
        if all(step - last.get(owner, -separation) >= separation for owner in rows[record]):
            selected.append(record)
            last |= dict.fromkeys(rows[record], step)
            idle = 0
        else:
            idle += 1
    return selected


@settings(max_examples=300, deadline=None)
@given(graphs.edges(max_users=12, max_records=20), shapes)
def test_batches_are_those_of_algorithm_4_as_printed(
    graph: Edges, shape: tuple[int, int, int]
) -> None:
    steps, batch_size, separation = shape
    expected = plain_algorithm_4(graph, steps, batch_size, separation)
    if expected is None:
        with pytest.raises(InputError, match=r"separation"):
            min_sep.min_separation(graph, steps=steps, batch_size=batch_size, separation=separation)
        return
    found = min_sep.min_separation(graph, steps=steps, batch_size=batch_size, separation=separation)
    assert found.batches.reshape(-1).tolist() == expected
    assert graphs.is_separated(graph, found.batches, separation)
    counts = found.multiplicity(graph.num_records)
    assert graph.contributions(counts).max() == found.realised_bound
    assert found.realised_bound <= -(-steps // separation)


@settings(max_examples=100, deadline=None)
@given(graphs.edges(max_users=12, max_records=20), st.integers(1, 6), st.integers(1, 3))
def test_the_largest_separation_works_and_one_more_does_not(
    graph: Edges, steps: int, batch_size: int
) -> None:
    largest = min_sep.largest_separation(graph, steps=steps, batch_size=batch_size)
    assert 0 <= largest <= steps
    if largest:
        assert plain_algorithm_4(graph, steps, batch_size, largest) is not None
    if largest < steps:
        assert plain_algorithm_4(graph, steps, batch_size, largest + 1) is None


def test_an_unreachable_separation_names_the_largest_one() -> None:
    graph = Edges.from_lists([[0], [1], [2]], num_users=3)
    with pytest.raises(InputError, match=r"separation=4 is out of reach.*3 is the largest"):
        min_sep.min_separation(graph, steps=6, batch_size=1, separation=4)
    with pytest.raises(InputError, match="at any separation"):
        min_sep.min_separation(graph, steps=2, batch_size=4, separation=1)


@pytest.mark.parametrize("shape", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_shapes_below_one_are_refused(shape: tuple[int, int, int]) -> None:
    steps, batch_size, separation = shape
    graph = Edges.from_lists([[0]], num_users=1)
    with pytest.raises(InputError, match="use 1 or more"):
        min_sep.min_separation(graph, steps=steps, batch_size=batch_size, separation=separation)


def test_a_larger_graph_fills_its_batches_at_the_largest_separation() -> None:
    graph = generators.regular_graph(
        num_records=20_000, mean_records=4.0, rng=np.random.default_rng(3)
    )
    largest = min_sep.largest_separation(graph, steps=200, batch_size=500)
    found = min_sep.min_separation(graph, steps=200, batch_size=500, separation=largest)
    assert largest > 1
    assert graphs.is_separated(graph, found.batches, largest)
