"""The closed form for much noise: above the truth, close to it, fast for any number of steps."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from oracles import binomial, one_step_delta
from scipy import optimize, stats

from oracles_privacy_loss import composed_delta, user_joins, user_replaced
from userdp.accounting import accountant, events, gaussian, mild, search
from userdp.accounting.steps import Exchanged, Mixture
from userdp.units import Adjacency

USER = np.array([0.0, 1.0])


def users(kind, rate: float, noise: float, count: int):
    return kind(noise=noise, shifts=USER, weights=np.array([1 - rate, rate]), count=count)


@pytest.mark.parametrize(
    ("noise", "group", "rate"),
    [(150.0, 1, 0.1), (200.0, 1, 0.5), (3e3, 500, 0.5), (900.0, 64, 0.1), (1e3, 300, 0.01)],
)
@pytest.mark.parametrize("delta", [1e-3, 1e-5])
def test_one_step_is_above_quadrature_and_close(noise, group, rate, delta):
    step = binomial(noise, group, rate, 1)
    found = mild.dominating([step], delta)
    assert found is not None
    # Deltas from that of the mean itself down to a small part of it.
    for share in (0.0, 0.5, 2.0):
        epsilon = share * found.mean
        exact = one_step_delta(step, epsilon) if epsilon else _total_variation(step)
        bound = math.exp(gaussian.log_delta(found.distance, epsilon)) + found.atoms
        assert exact * (1 - 1e-9) <= bound <= exact * 1.15


def _total_variation(step: Mixture) -> float:
    def gap(x: float) -> float:
        ratio = step.weights @ np.exp(-((x - step.shifts) ** 2 - x**2) / (2 * step.noise**2))
        return float(ratio) - 1

    at = optimize.brentq(gap, -step.noise, float(step.shifts[-1]) + step.noise, xtol=1e-13)
    with_user = float(step.weights @ stats.norm.sf(at, step.shifts, step.noise))
    return with_user - float(stats.norm.sf(at, 0, step.noise))


@pytest.mark.parametrize(("kind", "pair"), [(Mixture, user_joins), (Exchanged, user_replaced)])
def test_every_threshold_of_one_step_is_dominated(kind, pair):
    # The claim itself: no test of level alpha has more power than the Gaussian and its atom allow.
    noise, rate = 25.0, 0.2
    found = mild.dominating([users(kind, rate, noise, 1)], 1e-6)
    assert found is not None
    (shifts, weights), (others, other_weights) = pair(rate)
    x = np.linspace(-9, 9, 2001)[:, None]
    power = stats.norm.sf(x, np.array(shifts) / noise, 1) @ weights
    level = stats.norm.sf(x, np.array(others) / noise, 1) @ other_weights
    allowed = stats.norm.sf(stats.norm.isf(level) - found.distance) + found.atoms
    assert (power <= allowed * (1 + 1e-12)).all()
    # And the distance is needed up to little: the mean alone is exceeded somewhere.
    assert (power > stats.norm.sf(stats.norm.isf(level) - found.mean)).any()


@pytest.mark.parametrize(("kind", "pair"), [(Mixture, user_joins), (Exchanged, user_replaced)])
def test_many_steps_are_above_another_composition_and_close(kind, pair):
    noise, rate, count = 4e5, 0.1, 10_000
    step = users(kind, rate, noise, count)
    found = mild.dominating([step], 1e-8)
    assert found is not None
    assert found.is_tight
    epsilon = 2 * found.mean
    one, other = pair(rate)
    exact = composed_delta(epsilon, one, other, noise, count, spacing=found.mean / 2e4)
    bound = math.exp(gaussian.log_delta(found.distance, epsilon)) + found.atoms
    assert exact * (1 - 2e-3) <= bound <= exact * 1.01


@pytest.mark.parametrize("kind", [Mixture, Exchanged])
@pytest.mark.parametrize("noise", [300.0, 3e3])
def test_closed_form_and_grid_agree(kind, noise):
    step = users(kind, 0.1, noise, 10_000)
    closed = mild.dominating([step], 1e-6)
    assert closed is not None
    assert not closed.is_tight
    grid = search.epsilon_bound([step], 1e-6)
    assert grid <= closed.epsilon(1e-6) * (1 + 1e-4)
    assert closed.epsilon(1e-6) <= grid * 1.05


def test_little_noise_has_no_closed_form():
    assert mild.dominating([users(Mixture, 0.1, 1.0, 100)], 1e-6) is None


def test_a_tiny_epsilon_of_a_million_steps_is_met_in_a_moment():
    def event_of(noise: float):
        step = events.poisson_users_gaussian(user_sampling_prob=0.1, noise_multiplier=noise)
        return events.repeated(step, 10**6)

    start = time.process_time()
    found = accountant.calibrate(event_of, target=1e-4, delta=1e-6, adjacency=Adjacency.ADD_REMOVE)
    assert time.process_time() - start < 0.5
    # Almost a Gaussian mechanism at the mean of the moves, whose noise is the least there can be.
    least = 0.1 * 1e3 / gaussian.sensitivity(1e-4, 1e-6)
    assert least <= found <= 1.0005 * least


def test_users_of_hundreds_of_thousands_of_records_have_a_price():
    step = events.poisson_records_gaussian(
        record_sampling_prob=0.5, group_size=300_000, noise_multiplier=2e6
    )
    start = time.process_time()
    found = accountant.epsilon(
        events.repeated(step, 10), delta=1e-6, adjacency=Adjacency.ADD_REMOVE
    )
    assert time.process_time() - start < 5
    # At least that of a user who moves the sum by the mean number of records every time.
    least = gaussian.epsilon(150_000 / 2e6 * math.sqrt(10), 1e-6)
    assert least <= found <= 1.0001 * least
