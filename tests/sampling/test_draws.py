"""Drawing without a loop over users: exact in distribution, and nothing outside its bounds.

Statistical tests fix their seed; chi-square statistics are compared with the quantile of 1e-5.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from userdp.index import UserIndex
from userdp.sampling.draws import distinct, equally_many, poisson, rows_of_users


def is_likely(counts: np.ndarray, probs: np.ndarray) -> bool:
    """Whether the counts may come from these probabilities: chi-square, failure 1e-5."""
    expected = counts.sum() * probs
    statistic = ((counts - expected) ** 2 / expected).sum()
    return bool(statistic < stats.chi2.ppf(1 - 1e-5, len(counts) - 1))


@pytest.mark.statistical
@pytest.mark.parametrize("prob", [0.03, 0.09, 0.11, 0.6])
def test_all_patterns_of_coins_have_their_chance(prob: float) -> None:
    # Below 0.1 gaps are drawn, above it coins: 2^4 patterns, 20,000 draws, seed 1.
    rng = np.random.default_rng(1)
    counts = np.zeros(16)
    for _ in range(20_000):
        counts[int((1 << poisson(4, prob, rng)).sum())] += 1
    ones = np.array([bin(pattern).count("1") for pattern in range(16)])
    probs = prob**ones * (1 - prob) ** (4 - ones)
    # Patterns that are hardly ever seen are one, so that chi-square holds.
    rare = probs * 20_000 < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    probs = np.append(probs[~rare], probs[rare].sum())
    assert is_likely(counts[probs > 0], probs[probs > 0])


class AllNext:
    """A generator whose gaps all lead to the next place: more of them than anybody expects."""

    def geometric(self, prob: float, size: int) -> np.ndarray:
        return np.ones(size, dtype=np.int64)


def test_gaps_go_on_where_the_first_batch_of_them_ends() -> None:
    assert poisson(1000, 0.05, AllNext()).tolist() == list(range(1000))  # type: ignore[arg-type]


@pytest.mark.statistical
def test_all_places_are_equally_likely_and_sizes_are_binomial() -> None:
    # 40,000 draws from 300 places at 1%; seed 2.
    rng = np.random.default_rng(2)
    places = np.zeros(300)
    sizes = np.zeros(301)
    for _ in range(40_000):
        found = poisson(300, 0.01, rng)
        places[found] += 1
        sizes[len(found)] += 1
    assert is_likely(places, np.full(300, 1 / 300))
    few = np.append(sizes[:10], sizes[10:].sum())
    probs = stats.binom.pmf(np.arange(10), 300, 0.01)
    assert is_likely(few, np.append(probs, 1 - probs.sum()))


@given(
    count=st.integers(0, 400),
    prob=st.floats(0, 1, exclude_min=True, allow_subnormal=False),
    seed=st.integers(0, 2**32),
)
def test_places_ascend_and_are_there(count: int, prob: float, seed: int) -> None:
    found = poisson(count, prob, np.random.default_rng(seed))
    assert found.dtype == np.int64
    assert (np.diff(found) > 0).all()
    assert len(found) == 0 or (found[0] >= 0 and found[-1] < count)


@pytest.mark.parametrize("prob", [5e-324, 1e-300, 1e-18, 1e-9])
def test_rates_near_zero_draw_nobody_and_do_not_overflow(prob: float) -> None:
    rng = np.random.default_rng(3)
    # Chance of anybody in 100 draws: 1e-9 * 2^20 * 100 = 0.1 for the largest; seed 3 has nobody.
    assert all(len(poisson(2**20, prob, rng)) == 0 for _ in range(100))


def test_a_huge_number_of_places_costs_no_memory() -> None:
    found = poisson(2**50, 2**-40, np.random.default_rng(4))
    # Binomial with mean 1,024: within 6 standard errors.
    assert abs(len(found) - 1024) < 6 * 32


counts_and_sizes = st.lists(
    st.integers(0, 12).flatmap(lambda count: st.tuples(st.just(count), st.integers(0, count))),
    max_size=8,
)


@given(pairs=counts_and_sizes, seed=st.integers(0, 2**32))
def test_numbers_are_different_ascend_and_are_below_their_count(
    pairs: list[tuple[int, int]], seed: int
) -> None:
    counts, sizes = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    found = distinct(counts, sizes, np.random.default_rng(seed))
    assert len(found) == sizes.sum()
    for (count, _), own in zip(pairs, np.split(found, np.cumsum(sizes))[:-1], strict=True):
        assert (np.diff(own) > 0).all()
        assert len(own) == 0 or (own[0] >= 0 and own[-1] < count)


@pytest.mark.statistical
@pytest.mark.parametrize(("count", "size"), [(6, 1), (6, 3), (6, 4), (5, 5), (7, 2)])
@pytest.mark.parametrize("many", [False, True], ids=["each its own", "all alike"])
def test_all_sets_of_a_size_are_equally_likely(count: int, size: int, many: bool) -> None:
    # 12,000 sets at once, among sets of other sizes; seed 5.
    rng, draws = np.random.default_rng(5), 12_000
    if many:
        found = equally_many(draws, count, size, rng)
    else:
        counts = np.tile([count, 9], draws)
        sizes = np.tile([size, 2], draws)
        flat = distinct(counts, sizes, rng)
        found = flat[np.repeat(np.tile([True, False], draws), sizes)].reshape(draws, size)
    sets = {chosen: place for place, chosen in enumerate(combinations(range(count), size))}
    seen = np.zeros(len(sets))
    for line in found.tolist():
        seen[sets[tuple(line)]] += 1
    assert len(sets) == 1 or is_likely(seen, np.full(len(sets), 1 / len(sets)))


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    most=st.integers(1, 6),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_users_give_their_own_rows_and_at_most_so_many(
    sizes: list[int], most: int, seed: int, data: st.DataObject
) -> None:
    owners = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    index = UserIndex.from_owner_numbers(owners, num_users=len(sizes))
    users = np.array(
        data.draw(st.lists(st.integers(0, len(sizes) - 1), unique=True)), dtype=np.uint32
    )
    groups = list(rows_of_users(index, users, most, np.random.default_rng(seed)))
    assert len(groups) == len(users)
    for user, group in zip(users, groups, strict=True):
        assert len(group) == min(sizes[user], most)
        assert len(np.unique(group)) == len(group)
        assert (owners[group] == user).all()
