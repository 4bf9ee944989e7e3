"""The conformance suite of samplers, run on every one of them.

Statistical tests draw 20,000 cohorts with a fixed seed, and 100,000 among the slow tests. Their
bounds are 4 standard errors a comparison (failure probability 6.4e-5 each for a fresh seed) unless
they say otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from userdp.errors import InputError
from userdp.index import UserIndex
from userdp.sampling import Cohort, PoissonRecords, PoissonUsers, Sampler
from userdp.streams import RunSecret, Streams

# Users with 1, 4, 2, 1, 3 rows, in mixed order.
OWNERS = [0, 1, 2, 1, 3, 4, 1, 2, 4, 1, 4]


@dataclass(frozen=True)
class Case:
    """A sampler and how likely each of its units (users, or records) is to be in a cohort."""

    sampler: Sampler
    prob: float
    by_user: bool


CASES = {
    "users": Case(PoissonUsers(user_sampling_prob=0.3, group_size=2), 0.3, True),
    "records": Case(PoissonRecords(record_sampling_prob=0.2, group_size=4), 0.2, False),
}


each_sampler = pytest.mark.parametrize(
    ("name", "draws"),
    [pytest.param(name, 20_000, id=name) for name in CASES]
    + [
        pytest.param(name, 100_000, id=f"{name}, more draws", marks=pytest.mark.slow)
        for name in CASES
    ],
)


def streams(seed: int) -> Streams:
    return RunSecret.fixed_for_tests(seed).streams("cohort")


@cache
def inclusions(name: str, draws: int) -> np.ndarray:
    """One line a draw, one column a unit: was it in?"""
    case = CASES[name]
    index = case.sampler.limit_contributions(UserIndex.from_owners(OWNERS), streams(33))
    owner_of_row = np.asarray(OWNERS)
    found = np.zeros((draws, 5 if case.by_user else len(OWNERS)), dtype=bool)
    for line in range(draws):
        for group in case.sampler.draw(index, line, streams(33)):
            found[line, owner_of_row[group[0]] if case.by_user else group[0]] = True
    return found


@pytest.mark.statistical
@each_sampler
def test_inclusion_has_the_stated_probability_within_4_sigma(name: str, draws: int) -> None:
    prob = CASES[name].prob
    error = np.sqrt(prob * (1 - prob) / draws)
    assert np.abs(inclusions(name, draws).mean(axis=0) - prob).max() < 4 * error


@pytest.mark.statistical
@each_sampler
def test_units_are_drawn_independently_pair_covariance_below_4_sigma(name: str, draws: int) -> None:
    found = inclusions(name, draws)
    prob = CASES[name].prob
    covariance = np.cov(found, rowvar=False)
    off_diagonal = covariance[~np.eye(len(covariance), dtype=bool)]
    assert np.abs(off_diagonal).max() < 4 * prob * (1 - prob) / np.sqrt(draws)


@pytest.mark.statistical
@each_sampler
def test_consecutive_draws_are_independent_within_4_sigma(name: str, draws: int) -> None:
    sizes = inclusions(name, draws).sum(axis=1).astype(float)
    correlation = np.corrcoef(sizes[:-1], sizes[1:])[0, 1]
    assert abs(correlation) < 4 / np.sqrt(draws)


@pytest.mark.statistical
@each_sampler
def test_size_variance_is_binomial_within_3_percent(name: str, draws: int) -> None:
    # A fixed batch size would have variance 0. The estimate's own error is about 1%: 3 sigma.
    found = inclusions(name, draws)
    prob = CASES[name].prob
    expected = found.shape[1] * prob * (1 - prob)
    assert found.sum(axis=1).var() == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("name", CASES)
def test_rate_one_takes_everybody(name: str) -> None:
    sampler = (
        PoissonUsers(user_sampling_prob=1.0, group_size=9)
        if name == "users"
        else PoissonRecords(record_sampling_prob=1.0, group_size=9)
    )
    cohort = sampler.draw(UserIndex.from_owners(OWNERS), 0, streams(0))
    assert sorted(cohort.rows.tolist()) == list(range(len(OWNERS)))


@pytest.mark.parametrize("name", CASES)
def test_no_user_enters_with_more_rows_than_the_group_size(name: str) -> None:
    sampler = CASES[name].sampler
    owners = np.arange(300) % 7
    index = sampler.limit_contributions(UserIndex.from_owners(owners.tolist()), streams(1))
    for step in range(200):
        rows = sampler.draw(index, step, streams(1)).rows
        assert len(np.unique(rows)) == len(rows)
        assert np.bincount(owners[rows], minlength=7).max() <= sampler.group_size


def test_user_sampling_draws_one_group_a_user_with_all_that_user_brings() -> None:
    # Each group is clipped on its own: a user in two groups would count twice.
    sampler = PoissonUsers(user_sampling_prob=0.6, group_size=2)
    index = UserIndex.from_owners(OWNERS)
    owner_of_row = np.asarray(OWNERS)
    for step in range(200):
        groups = list(sampler.draw(index, step, streams(8)))
        users = [set(owner_of_row[group].tolist()) for group in groups]
        assert all(len(owners) == 1 for owners in users)
        assert len(set.union(set(), *users)) == len(groups)
        for group, (user,) in zip(groups, users, strict=True):
            assert len(group) == min(2, OWNERS.count(user))


def test_record_sampling_draws_one_group_a_record() -> None:
    # Thm. 3 counts records, each of which moves the sum by one clip norm at most.
    sampler = PoissonRecords(record_sampling_prob=0.6, group_size=4)
    for step in range(200):
        groups = list(sampler.draw(UserIndex.from_owners(OWNERS), step, streams(8)))
        assert all(len(group) == 1 for group in groups)
        rows = [int(group[0]) for group in groups]
        assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("name", CASES)
def test_no_users_gives_empty_cohorts(name: str) -> None:
    sampler = CASES[name].sampler
    index = sampler.limit_contributions(UserIndex.from_owners([]), streams(0))
    assert len(sampler.draw(index, 0, streams(0))) == 0


@pytest.mark.parametrize("name", CASES)
def test_any_step_in_any_order_gives_the_same_cohort(name: str) -> None:
    sampler = CASES[name].sampler
    index = sampler.limit_contributions(UserIndex.from_owners(OWNERS), streams(3))
    in_order = [sampler.draw(index, step, streams(4)) for step in range(20)]
    for step in (19, 0, 7, 7, 3):
        again = sampler.draw(index, step, streams(4))
        assert again.rows.tolist() == in_order[step].rows.tolist()
        assert again.indptr.tolist() == in_order[step].indptr.tolist()
    assert len({tuple(cohort.rows.tolist()) for cohort in in_order}) > 1


@pytest.mark.parametrize("prob", [0.0, -0.1, 1.0001, float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["users", "records"])
def test_probability_outside_0_1_is_refused(prob: float, kind: str) -> None:
    settings = {"user_sampling_prob" if kind == "users" else "record_sampling_prob": prob}
    sampler = PoissonUsers if kind == "users" else PoissonRecords
    with pytest.raises(InputError, match="is not a probability"):
        sampler(group_size=1, **settings)


@pytest.mark.parametrize("group_size", [0, -1])
def test_group_size_below_one_is_refused(group_size: int) -> None:
    with pytest.raises(InputError, match="group_size"):
        PoissonUsers(user_sampling_prob=0.5, group_size=group_size)
    with pytest.raises(InputError, match="group_size"):
        PoissonRecords(record_sampling_prob=0.5, group_size=group_size)


def test_record_sampling_refuses_users_that_the_event_would_not_cover() -> None:
    sampler = PoissonRecords(record_sampling_prob=0.5, group_size=2)
    with pytest.raises(InputError, match="limit_contributions"):
        sampler.draw(UserIndex.from_owners(OWNERS), 0, streams(0))


@pytest.mark.statistical
def test_rows_of_a_large_user_are_equally_likely() -> None:
    # 20,000 draws of 2 of 5 rows: each in with probability 0.4, within 4 sigma, seed 2.
    sampler = PoissonUsers(user_sampling_prob=1.0, group_size=2)
    index = UserIndex.from_owners([0] * 5)
    counts = np.zeros(5)
    for step in range(20_000):
        counts[sampler.draw(index, step, streams(2)).rows] += 1
    assert np.abs(counts / 20_000 - 0.4).max() < 4 * np.sqrt(0.4 * 0.6 / 20_000)


@pytest.mark.slow
@pytest.mark.statistical
def test_group_size_one_record_sampling_has_the_distribution_of_user_sampling() -> None:
    # ELS with G = 1 and one record a user against ULS: all 2^4 cohorts, 40,000 draws each, seeds 5
    # and 6; chi-square with 15 degrees of freedom exceeds 44.3 with probability 1e-4.
    index = UserIndex.from_owners(range(4))
    samplers = (
        PoissonUsers(user_sampling_prob=0.35, group_size=1),
        PoissonRecords(record_sampling_prob=0.35, group_size=1),
    )
    draws = 40_000
    expected = np.array(
        [0.35 ** bin(s).count("1") * 0.65 ** (4 - bin(s).count("1")) for s in range(16)]
    )
    for sampler, seed in zip(samplers, (5, 6), strict=True):
        limited = sampler.limit_contributions(index, streams(seed))
        counts = np.zeros(16)
        for step in range(draws):
            cohort = sampler.draw(limited, step, streams(seed))
            assert all(len(group) == 1 for group in cohort)
            counts[int((1 << cohort.rows).sum())] += 1
        assert ((counts - draws * expected) ** 2 / (draws * expected)).sum() < 44.3


def test_cohort_yields_its_groups_in_order() -> None:
    groups = [np.array([3, 1]), np.array([], dtype=np.int64), np.array([2])]
    cohort = Cohort.of(groups)
    assert len(cohort) == 3
    assert [group.tolist() for group in cohort] == [[3, 1], [], [2]]
    assert len(Cohort.of([])) == 0
