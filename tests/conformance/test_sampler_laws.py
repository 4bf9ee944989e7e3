"""The law of every sampler: who takes part, with whom, how many, and when again.

Every test draws fixed steps of many runs, each with a secret of its own, so that run-wide choices
are drawn afresh, too. Seeds are fixed. Bounds are 4.5 standard errors a comparison (failure
probability 7e-6 each for fresh seeds; about 200 comparisons, so 1.4e-3 in all) unless they say
otherwise. The slow variants draw 100,000 cohorts, as row 3 of docs/sharp_edges.md asks for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from math import comb

import numpy as np
import pytest
from numpy.typing import NDArray

from userdp.index import UserIndex
from userdp.sampling import (
    SAMPLERS,
    Allocation,
    BalancedIteration,
    BallsInBins,
    CappedPoissonUsers,
    CyclicPoissonRecords,
    CyclicPoissonUsers,
    PoissonRecords,
    PoissonUsers,
    Sampler,
    Shuffled,
    ShuffledRecords,
    WithoutReplacement,
)
from userdp.streams import RunSecret
from userdp.units import SamplingUnit

USERS = 5
SIGMAS = 4.5
FEW, MANY = 800, 100_000


@dataclass(frozen=True)
class Law:
    """What a sampler says about `units` users, or about as many records of different users.

    `once` is the chance to be in a step, `both` that two units are in the same step, and `again`
    that one unit is in both of two steps. Sizes have the variance `spread`, by default that of
    independent coins.
    """

    sampler: Sampler
    once: float
    both: float
    again: dict[tuple[int, int], float]
    units: int = USERS
    spread: float | None = None
    is_private: bool = True
    steps: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        ((first, second),) = self.again
        object.__setattr__(self, "steps", (first, second))


def capped(q: float, cap: int, places: int) -> tuple[float, float]:
    """The chances that one place, and two places, are kept; by summing over all numbers drawn."""
    drawn = [comb(places, n) * q**n * (1 - q) ** (places - n) for n in range(places + 1)]
    one = sum(p * min(n, cap) / places for n, p in enumerate(drawn))
    two = sum(
        p * min(n, cap) * (min(n, cap) - 1) / (places * (places - 1)) for n, p in enumerate(drawn)
    )
    return one, two


CAPPED = capped(0.4, 2, 7)
LAWS = {
    "poisson users": Law(
        PoissonUsers(user_sampling_prob=0.3, group_size=2), 0.3, 0.09, {(0, 1): 0.09}
    ),
    "rare poisson users": Law(
        PoissonUsers(user_sampling_prob=0.08, group_size=2), 0.08, 0.0064, {(0, 1): 0.0064}
    ),
    "poisson records": Law(
        PoissonRecords(record_sampling_prob=0.2, group_size=2), 0.2, 0.04, {(0, 1): 0.04}
    ),
    "capped": Law(
        CappedPoissonUsers(user_sampling_prob=0.4, cap=2, num_users=7, group_size=2),
        CAPPED[0],
        CAPPED[1],
        {(0, 1): CAPPED[0] ** 2},
        spread=5 * CAPPED[0] * (1 - CAPPED[0]) + 20 * (CAPPED[1] - CAPPED[0] ** 2),
    ),
    "cyclic users, the same part": Law(
        CyclicPoissonUsers(user_sampling_prob=0.6, parts=3, group_size=2),
        0.2,
        0.04,
        {(1, 7): 0.12},
    ),
    "cyclic users, another part": Law(
        CyclicPoissonUsers(user_sampling_prob=0.6, parts=3, group_size=2), 0.2, 0.04, {(1, 3): 0.0}
    ),
    "cyclic records": Law(
        CyclicPoissonRecords(record_sampling_prob=0.6, parts=3, group_size=1),
        0.2,
        0.04,
        {(2, 5): 0.12},
    ),
    "balls in bins, the same bin": Law(
        BallsInBins(bins=4, group_size=2), 1 / 4, 1 / 16, {(1, 9): 1 / 4}
    ),
    "balls in bins, another bin": Law(
        BallsInBins(bins=4, group_size=2), 1 / 4, 1 / 16, {(1, 2): 0.0}
    ),
    "balanced, the same round": Law(
        BalancedIteration(round_length=4, group_size=2), 1 / 4, 1 / 16, {(4, 7): 0.0}
    ),
    "balanced, another round": Law(
        BalancedIteration(round_length=4, group_size=2), 1 / 4, 1 / 16, {(3, 4): 1 / 16}
    ),
    "allocation": Law(
        Allocation(steps=8, participations=3, group_size=2), 3 / 8, 9 / 64, {(2, 5): 6 / 56}
    ),
    "allocation, most steps": Law(
        Allocation(steps=8, participations=6, group_size=2), 6 / 8, 36 / 64, {(2, 5): 30 / 56}
    ),
    "without replacement": Law(
        WithoutReplacement(cohort_size=2, num_users=7, group_size=2),
        2 / 7,
        2 / 42,
        {(0, 1): 4 / 49},
        # Hypergeometric: 2 of 7 places, 5 of them with users.
        spread=2 * 5 / 7 * 2 / 7 * 5 / 6,
    ),
    "shuffled users": Law(
        Shuffled(cohort_size=2, num_users=USERS, group_size=2),
        2 / 5,
        1 / 10,
        {(0, 1): 0.0},
        spread=0.0,
        is_private=False,
    ),
    "shuffled records": Law(
        ShuffledRecords(batch_size=2, num_records=USERS, group_size=2),
        2 / 5,
        1 / 10,
        {(1, 2): 4 / 25},
        spread=0.0,
        is_private=False,
    ),
}


def each_law(*, private: bool | None = None) -> pytest.MarkDecorator:
    chosen = [name for name, law in LAWS.items() if private in (None, law.is_private)]
    return pytest.mark.parametrize(
        ("name", "runs"),
        [pytest.param(name, FEW, id=name) for name in chosen]
        + [
            pytest.param(name, MANY, id=f"{name}, more draws", marks=pytest.mark.slow)
            for name in chosen
        ],
    )


@cache
def taking_part(name: str, runs: int, users: int = USERS, seed: int = 0) -> NDArray[np.bool_]:
    """runs x 2 steps x units: who was in which of the law's two steps of each run.

    User i has i + 1 rows where users are drawn, and one where records are.
    """
    law = LAWS[name]
    by_user = law.sampler.unit is SamplingUnit.USER
    owners = np.repeat(np.arange(users), np.arange(users) + 1 if by_user else 1)
    whole = UserIndex.from_owners(owners.tolist())
    found = np.zeros((runs, 2, users), dtype=bool)
    for run in range(runs):
        secret = RunSecret.fixed_for_tests(seed * 10_000_000 + run)
        streams = secret.streams("cohort")
        index = law.sampler.limit_contributions(whole, secret.streams("limit"))
        for place, step in enumerate(law.steps):
            rows = law.sampler.draw(index, step, streams).rows
            found[run, place, owners[rows]] = True
    return found


def error(prob: float, runs: int) -> float:
    """The allowed difference of a frequency from `prob`; 0 and 1 must be met exactly."""
    return SIGMAS * np.sqrt(prob * (1 - prob) / runs)


def test_every_sampler_that_draws_has_a_law() -> None:
    kinds = {type(law.sampler) for law in LAWS.values()}
    assert {kind.__name__ for kind in SAMPLERS if not kind.is_ordered} <= {
        kind.__name__ for kind in kinds
    }


@pytest.mark.statistical
@each_law()
def test_row_3_inclusion_has_the_stated_chance(name: str, runs: int) -> None:
    found = taking_part(name, runs).mean(axis=0)
    assert np.abs(found - LAWS[name].once).max() <= error(LAWS[name].once, runs)


@pytest.mark.statistical
@each_law()
def test_row_3_two_users_share_a_step_as_often_as_stated(name: str, runs: int) -> None:
    law, found = LAWS[name], taking_part(name, runs)[:, 0]
    together = (found.T.astype(float) @ found) / runs
    apart = together[~np.eye(USERS, dtype=bool)]
    assert np.abs(apart - law.both).max() <= error(law.both, runs)


@pytest.mark.statistical
@each_law()
def test_row_3_sizes_vary_as_stated(name: str, runs: int) -> None:
    # The error of a sample variance, by its own fourth moment.
    law, sizes = LAWS[name], taking_part(name, runs)[:, 0].sum(axis=1).astype(float)
    spread = USERS * law.once * (1 - law.once) if law.spread is None else law.spread
    squares = (sizes - sizes.mean()) ** 2
    assert abs(sizes.var() - spread) <= SIGMAS * squares.std() / np.sqrt(runs) + 1e-12
    assert sizes.mean() == pytest.approx(
        USERS * law.once, abs=SIGMAS * np.sqrt(spread / runs) + 1e-12
    )


@pytest.mark.statistical
@each_law()
def test_one_user_is_in_two_steps_as_often_as_stated(name: str, runs: int) -> None:
    law, found = LAWS[name], taking_part(name, runs)
    again = law.again[law.steps]
    both = (found[:, 0] & found[:, 1]).mean(axis=0)
    assert np.abs(both - again).max() <= error(again, runs)


@pytest.mark.statistical
@each_law(private=True)
def test_one_more_user_changes_nobody_elses_law(name: str, runs: int) -> None:
    """All joint outcomes of the others in both steps, with the user and without: chi-square.

    Three others make 64 outcomes; those seen fewer than 20 times are one. The statistic is about
    normal after a cube root (Wilson and Hilferty), and 4.5 of its standard errors are allowed.
    """
    patterns = []
    for users, seed in ((3, 1), (4, 2)):
        found = taking_part(name, runs, users=users, seed=seed)[:, :, :3].reshape(runs, 6)
        patterns.append(np.bincount(found @ (1 << np.arange(6)), minlength=64))
    without, with_user = patterns
    total = without + with_user
    rare = total < 20
    without = np.append(without[~rare], without[rare].sum())
    with_user = np.append(with_user[~rare], with_user[rare].sum())
    total = without + with_user
    without, with_user, total = without[total > 0], with_user[total > 0], total[total > 0]
    statistic = float(((without - with_user) ** 2 / total).sum())
    freedom = len(total) - 1
    normal = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(
        2 / (9 * freedom)
    )
    assert normal < SIGMAS


@pytest.mark.statistical
@each_law(private=True)
def test_a_user_without_rows_is_drawn_like_any_other(name: str, runs: int) -> None:
    """How many rows somebody has changes neither its own chance nor that of others.

    User i has i + 1 rows in `taking_part`, and all chances are compared with one number there. Here
    groups without rows are counted, too.
    """
    law = LAWS[name]
    if law.sampler.unit is SamplingUnit.RECORD:
        pytest.skip("a record that is not there has no coin")
    index = UserIndex(indptr=np.array([0, 0, 2, 2, 3, 3]), rows=np.arange(3))
    draws = min(runs, FEW)
    sizes = [
        len(law.sampler.draw(index, law.steps[0], streams.streams("cohort")))
        for streams in map(RunSecret.fixed_for_tests, range(draws))
    ]
    spread = USERS * law.once * (1 - law.once) if law.spread is None else law.spread
    assert np.mean(sizes) == pytest.approx(
        USERS * law.once, abs=SIGMAS * np.sqrt(spread / draws) + 1e-12
    )
