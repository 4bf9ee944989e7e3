from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bounding import graphs
from reproductions.ganesh2025 import generators, partition
from userdp.bounding.edges import Edges
from userdp.errors import InputError


@pytest.mark.slow
@given(graphs.edges(max_users=10, max_records=30), st.data())
def test_a_kept_record_has_all_its_owners_in_its_group(graph: Edges, data: st.DataObject) -> None:
    num_groups = data.draw(st.integers(1, graph.num_users))
    found = partition.partition_users(graph, num_groups=num_groups)
    lost = 0
    for owners, group in zip(graphs.owners_of(graph), found.group_of_record, strict=True):
        groups = {int(found.group_of_user[owner]) for owner in owners}
        lost += len(groups) > 1
        assert groups == {int(group)} if group >= 0 else len(groups) > 1
    assert found.discarded == lost
    assert found.sizes.sum() == graph.num_records - lost


def test_one_group_discards_nothing() -> None:
    graph = Edges.from_lists([[0, 1], [1, 2]], num_users=3)
    assert partition.partition_users(graph, num_groups=1).discarded == 0


def test_separate_communities_stay_whole() -> None:
    records = [[5 * c + i, 5 * c + (i + 1) % 5] for c in range(4) for i in range(5)]
    graph = Edges.from_lists(records, num_users=20)
    found = partition.partition_users(graph, num_groups=4)
    assert found.discarded == 0
    assert found.sizes.tolist() == [5, 5, 5, 5]


def test_joining_owners_discards_less_than_a_random_partition() -> None:
    rng = np.random.default_rng(5)
    graph = generators.regular_graph(num_records=20_000, mean_records=2.0, rng=rng)
    random = partition.cyclic_groups(graph, rng.integers(0, 8, size=graph.num_users), num_groups=8)
    assert partition.partition_users(graph, num_groups=8).discarded < 0.8 * random.discarded


def test_bad_partitions_are_refused() -> None:
    graph = Edges.from_lists([[0, 1]], num_users=2)
    for groups in ([0], [0, 2], [0, -1]):
        with pytest.raises(InputError, match="group"):
            partition.cyclic_groups(graph, np.array(groups), num_groups=2)
    for count in (0, 3):
        with pytest.raises(InputError, match="num_groups"):
            partition.partition_users(graph, num_groups=count)
