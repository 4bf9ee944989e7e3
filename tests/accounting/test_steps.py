"""Kinds of steps: cohorts that are cut at a cap, and steps without noise."""

from __future__ import annotations

import math

import pytest
from dp_accounting import dp_event
from oracles import hockey_stick
from scipy import stats

from userdp.accounting import accountant, events, search, steps
from userdp.units import Adjacency

ADD_REMOVE = Adjacency.ADD_REMOVE
REPLACE = Adjacency.REPLACE


@pytest.mark.parametrize("adjacency", [ADD_REMOVE, REPLACE])
def test_a_capped_cohort_costs_its_own_price_and_not_that_of_plain_sampling(adjacency):
    # One step, 20 users at rate 0.2, at most 5 of them. Full cohorts exchange two users.
    users, rate, cap, noise, delta = 20, 0.2, 5, 1.0, 1e-3
    event = events.capped_poisson_users_gaussian(
        user_sampling_prob=rate, cap=cap, num_users=users, noise_multiplier=noise
    )
    # Our own bound: the larger number of dp_accounting would hide that it is wrong.
    mechanism = steps.of(event, adjacency)
    assert mechanism is not None
    found = search.epsilon_bound(mechanism, delta)
    others = [math.comb(19, k) * rate**k * (1 - rate) ** (19 - k) for k in range(20)]
    full = sum(others[cap:])
    everybody = [math.comb(20, k) * rate**k * (1 - rate) ** (20 - k) for k in range(21)]
    kept = sum(everybody[cap + 1 :]) * cap / users / full

    def mixture(chance: float, shift: float):
        return lambda x: (
            (1 - chance) * stats.norm.pdf(x, 0, noise) + chance * stats.norm.pdf(x, shift, noise)
        )

    other = mixture(rate, -1.0) if adjacency is REPLACE else mixture(0.0, 0.0)
    pairs = [(full, mixture(kept, 2.0), mixture(kept, -2.0)), (1 - full, mixture(rate, 1.0), other)]
    exact = sum(chance * hockey_stick(p, q, found, [0, 1, 2, 4]) for chance, p, q in pairs)
    assert exact == pytest.approx(delta, rel=0.01)
    plain = events.poisson_users_gaussian(user_sampling_prob=rate, noise_multiplier=noise)
    assert found > 1.1 * accountant.epsilon(plain, delta=delta, adjacency=adjacency)


def test_a_mechanism_without_noise_has_no_finite_epsilon():
    for event in (
        dp_event.NonPrivateDpEvent(),
        dp_event.GaussianDpEvent(0.0),
        dp_event.LaplaceDpEvent(0.0),
        events.combined([dp_event.GaussianDpEvent(1.0), dp_event.NonPrivateDpEvent()]),
    ):
        assert steps.has_no_privacy(event)
        assert accountant.epsilon(event, delta=1e-6, adjacency=ADD_REMOVE) == math.inf
