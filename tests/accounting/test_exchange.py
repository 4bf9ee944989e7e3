"""Replacing a user: the opposite mixture is the worst pair."""

from __future__ import annotations

import math

import pytest
from oracles import hockey_stick
from scipy import stats

from userdp.accounting import accountant, events
from userdp.units import Adjacency

ADD_REMOVE = Adjacency.ADD_REMOVE
REPLACE = Adjacency.REPLACE


def test_replacing_sampled_records_is_the_opposite_mixture():
    # One step, Binomial(3, 0.2) records that all pull one way, or all the other.
    noise, group, rate, delta = 2.0, 3, 0.2, 1e-4
    event = events.poisson_records_gaussian(
        record_sampling_prob=rate, group_size=group, noise_multiplier=noise
    )
    found = accountant.epsilon(event, delta=delta, adjacency=REPLACE)
    weights = [math.comb(group, k) * rate**k * (1 - rate) ** (group - k) for k in range(4)]

    def side(sign: int):
        return lambda x: sum(w * stats.norm.pdf(x, sign * k, noise) for k, w in enumerate(weights))

    exact = hockey_stick(side(1), side(-1), found, [0, 3, 6, 9])
    assert exact == pytest.approx(delta, rel=5e-3)
    assert accountant.evaluate(event, delta=delta, adjacency=REPLACE).error_bound < 1e-3


@pytest.mark.parametrize(
    ("group", "rate", "noise"), [(4, 0.01, 0.7), (32, 0.02, 2.0), (16, 0.3, 1)]
)
def test_replacing_sampled_records_always_has_a_finite_price(group, rate, noise):
    event = events.repeated(
        events.poisson_records_gaussian(
            record_sampling_prob=rate, group_size=group, noise_multiplier=noise
        ),
        1000,
    )
    replaced = accountant.epsilon(event, delta=1e-6, adjacency=REPLACE)
    assert 1.2 * accountant.epsilon(event, delta=1e-6, adjacency=ADD_REMOVE) < replaced < math.inf
