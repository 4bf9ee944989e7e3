"""Fixed graphs (Ganesh et al. 2025, Def. 2.1): a user's records say something else, or nothing."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from dp_accounting import dp_event
from oracles import hockey_stick
from scipy import stats

from userdp.accounting import accountant, events, group, renyi
from userdp.units import Adjacency

REPLACE = Adjacency.FIXED_GRAPH_REPLACE


def step(rate: float, records: int, noise: float) -> events.DpEvent:
    return events.poisson_records_gaussian(
        record_sampling_prob=rate, group_size=records, noise_multiplier=noise
    )


def _density(updates: np.ndarray, rate: float, noise: float):
    """The outputs of one step, every record with its own coin, by brute force over all coins."""
    coins = list(product((0, 1), repeat=len(updates)))
    chances = np.array([rate ** sum(c) * (1 - rate) ** (len(c) - sum(c)) for c in coins])
    means = np.array([float(np.dot(c, updates)) for c in coins])
    return lambda x: float(chances @ stats.norm.pdf(x, means, noise))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("adjacency", [REPLACE, Adjacency.FIXED_GRAPH_ZERO_OUT])
def test_whatever_records_say_before_and_after_the_price_covers_it(seed: int, adjacency: Adjacency):
    rng = np.random.default_rng(seed)
    rate, noise, records = (0.2, 0.6, 0.4)[seed % 3], (0.8, 1.5)[seed % 2], 3
    # The first seed is the worst case: all pull one way, and then the other way.
    before = np.ones(records) if seed == 0 else rng.uniform(-1, 1, records)
    after = -before if seed == 0 else rng.uniform(-1, 1, records)
    after = after if adjacency is REPLACE else np.zeros(records)
    for epsilon in (0.1, 1.0, 2.0):
        found = accountant.deltas(
            step(rate, records, noise), epsilons=[epsilon], delta=1e-5, adjacency=adjacency
        )[0]
        one, other = _density(before, rate, noise), _density(after, rate, noise)
        points = np.linspace(-6, 6, 25)
        for first, second in ((one, other), (other, one)):
            true = hockey_stick(first, second, epsilon, points)
            assert true <= found * (1 + 1e-7)
            if seed == 0 and epsilon < 2 and adjacency is REPLACE:
                assert found == pytest.approx(true, rel=0.01)


def test_without_sampling_the_distance_is_two_clip_norms():
    alone = dp_event.GaussianDpEvent(3.0)
    assert accountant.epsilon(alone, delta=1e-6, adjacency=REPLACE) == pytest.approx(
        accountant.epsilon(
            dp_event.GaussianDpEvent(1.5), delta=1e-6, adjacency=Adjacency.ADD_REMOVE
        ),
        rel=1e-5,
    )


def test_the_prices_are_those_of_one_owner_under_every_accountant():
    run = events.repeated(step(0.05, 4, 4.0), 200)
    for fixed, usual in (
        (REPLACE, Adjacency.REPLACE),
        (Adjacency.FIXED_GRAPH_ZERO_OUT, Adjacency.ZERO_OUT),
    ):
        for price in (accountant.evaluate, renyi.evaluation):
            found = [price(run, delta=1e-5, adjacency=one).epsilon for one in (fixed, usual)]
            assert found[0] == found[1]
            assert math.isfinite(found[0])
        alone = events.repeated(step(0.05, 1, 4.0), 200)
        black_box = [
            group.evaluation(alone, group_size=4, delta=1e-5, adjacency=one).epsilon
            for one in (fixed, usual)
        ]
        assert black_box[0] == black_box[1]
