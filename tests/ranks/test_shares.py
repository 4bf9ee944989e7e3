"""Which groups each rank takes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from userdp.ranks.shares import costs_of, places_of, shares, taken
from userdp.sampling import Cohort


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 9))
def test_every_group_is_taken_once_and_whole(costs: list[int], count: int) -> None:
    found = shares(np.array(costs, dtype=np.int64), count)
    assert len(found) == count
    assert sorted(np.concatenate(found).tolist()) == list(range(len(costs)))
    assert all((np.diff(share) > 0).all() for share in found)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 9))
def test_no_share_is_much_larger_than_the_best_possible(costs: list[int], count: int) -> None:
    found = shares(np.array(costs, dtype=np.int64), count)
    largest = max(sum(costs[place] for place in share) for share in found)
    least = max(sum(costs) / count, max(costs))
    # Graham 1969: at most 4/3 - 1/(3m) of the optimum, and here `least` is at most the optimum. A
    # greedy list never exceeds the mean by more than one group.
    assert largest <= sum(costs) / count + max(costs)
    if len(costs) <= count:
        assert largest == max(costs)
    assert largest <= 2 * least


def test_groups_are_weighed_by_their_tokens_or_else_by_their_rows() -> None:
    cohort = Cohort.of([np.array([0, 1]), np.array([], dtype=np.int64), np.array([3])])
    assert costs_of(cohort, np.array([5, 6, 7, 8])).tolist() == [11, 0, 8]
    assert costs_of(cohort, None).tolist() == [2, 0, 1]


def test_the_shares_of_a_cohort_are_its_groups() -> None:
    rng = np.random.default_rng(0)
    groups = [rng.integers(100, size=rng.integers(0, 5)) for _ in range(17)]
    cohort = Cohort.of(groups)
    found: dict[int, list[int]] = {}
    for rank in range(3):
        places = places_of(cohort, rank, 3)
        for place, group in zip(places.tolist(), taken(cohort, places), strict=True):
            found[place] = group.tolist()
    assert [found[place] for place in range(17)] == [group.tolist() for group in groups]
