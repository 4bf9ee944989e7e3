from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bounding import graphs
from reproductions.ganesh2025.min_separation_program import exact_min_separation
from userdp.bounding.edges import Edges
from userdp.errors import InputError


@settings(max_examples=40, deadline=None)
@given(
    graphs.edges(max_users=4, max_records=5),
    st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3)),
)
def test_the_integer_program_matches_brute_force(graph: Edges, shape: tuple[int, int, int]) -> None:
    steps, batch_size, separation = shape
    best = None
    # Batches are sets of distinct records, as in the program: x[i, t] is 0 or 1.
    sets = [
        batch
        for batch in product(range(graph.num_records), repeat=batch_size)
        if list(batch) == sorted(set(batch))
    ]
    for batches in product(sets, repeat=steps):
        array = np.array(batches)
        if graphs.is_separated(graph, array, separation):
            counts = np.bincount(array.reshape(-1), minlength=graph.num_records)
            worst = int(graph.contributions(counts).max())
            best = worst if best is None else min(best, worst)
    found = exact_min_separation(graph, steps=steps, batch_size=batch_size, separation=separation)
    if best is None:
        assert found is None
    else:
        assert found is not None
        batches, proven = found
        assert proven
        assert batches.realised_bound == best
        assert graphs.is_separated(graph, batches.batches, separation)


def test_the_integer_program_is_for_small_cases() -> None:
    graph = Edges.from_lists([[0]] * 1000, num_users=1)
    with pytest.raises(InputError, match="Use min_separation"):
        exact_min_separation(graph, steps=1000, batch_size=1, separation=1)
