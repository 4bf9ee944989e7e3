"""Row 19: a record of several owners is charged to all of them."""

from __future__ import annotations

import numpy as np
import pytest

from userdp.bounding.edges import Edges
from userdp.bounding.greedy import greedy
from userdp.bounding.selection import Selection
from userdp.errors import InputError

# Users 0, 1 and 2 wrote record 0 together; each has two records alone; user 3 has one.
EDGES = Edges.from_lists([[0, 1, 2], [0], [0], [1], [1], [2], [2], [3]], num_users=4)


def test_row_19_a_record_of_three_owners_is_charged_to_all_three() -> None:
    only = np.eye(8, dtype=np.int64)[0]
    assert EDGES.contributions(only).tolist() == [1, 1, 1, 0]
    everything = np.ones(8, dtype=np.int64)
    assert EDGES.contributions(everything).tolist() == [3, 3, 3, 1]
    # Whoever forgets one of the owners finds at most two records of a user here.
    with pytest.raises(InputError, match="owns 3 selected records"):
        Selection.of(EDGES, everything, 2, method="greedy")


def test_row_19_a_selection_counts_the_shared_record_for_each_owner() -> None:
    chosen = greedy(EDGES, 1)
    assert EDGES.contributions(chosen).max() == 1
