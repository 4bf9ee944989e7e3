"""The best of a random number of runs: how many are made, and what they cost."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from scipy import stats

from userdp.accounting import accountant, best_of_runs, events, renyi
from userdp.errors import InputError
from userdp.units import Adjacency

ADD_REMOVE = Adjacency.ADD_REMOVE


@pytest.mark.parametrize(("mean_runs", "gamma"), [(4.0, 0.25), (10.0, 0.1), (1.0, 1.0)])
def test_random_stopping_draws_the_geometric_distribution_it_is_priced_by(mean_runs, gamma):
    # P(K = k) = gamma (1 - gamma)^(k - 1), its mean 1 / gamma: typed here, not taken from the code.
    # Inversion: the k-th uniform draw lies just below, or just above, the chance of k runs or less.
    class Fixed:
        def __init__(self, value: float):
            self.value = value

        def random(self) -> float:
            return self.value

    for runs in range(1, 12):
        reached = 1 - (1 - gamma) ** runs
        for value, expected in ((reached - 1e-7, runs), (reached + 1e-7, runs + 1)):
            if 0 <= value < 1 and gamma < 1:
                found = best_of_runs.number_of_runs(mean_runs=mean_runs, rng=Fixed(value))
                assert found == expected
    assert best_of_runs.number_of_runs(mean_runs=1.0, rng=Fixed(0.999)) == 1


def test_random_stopping_is_priced_for_the_mean_that_is_drawn():
    # Papernot and Steinke 2022, Thm. 2 with eta = 1: at order a, e + 2 min_b ((1 - 1/b) e_b +
    # log(mean) / b) + log(mean) / (a - 1), here for one Gaussian, e_a = a / (2 sigma^2).
    mean_runs, noise, delta = 10.0, 8.0, 1e-5
    event = best_of_runs.randomly_stopped(dp_event.GaussianDpEvent(noise), mean_runs=mean_runs)
    found = accountant.epsilon(event, delta=delta, adjacency=ADD_REMOVE)
    orders = np.linspace(1.05, 400, 100_000)
    run = orders / (2 * noise**2)
    constant = 2 * float(np.min((1 - 1 / orders) * run + math.log(mean_runs) / orders))
    stopped = run + constant + math.log(mean_runs) / (orders - 1)
    exact = float(np.min(stopped + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)))
    assert exact * 0.999 <= found <= 1.02 * exact
    once = RdpAccountant().compose(dp_event.GaussianDpEvent(noise)).get_epsilon(delta)
    assert found > 1.5 * once


def test_random_stopping_costs_more_than_one_run_and_less_than_all():
    run = events.repeated(
        events.poisson_users_gaussian(user_sampling_prob=0.01, noise_multiplier=1.0), 100
    )

    def rdp(event: events.DpEvent) -> float:
        return renyi.evaluation(event, delta=1e-6, adjacency=Adjacency.ADD_REMOVE).epsilon

    best = rdp(best_of_runs.randomly_stopped(run, mean_runs=100.0))
    assert rdp(run) < best < rdp(best_of_runs.swept(run, 100))


DELTA = 1e-5


def gaussian_runs(noise: float, steps: int) -> events.DpEvent:
    step = events.poisson_users_gaussian(user_sampling_prob=1.0, noise_multiplier=noise)
    return events.repeated(step, steps)


def test_best_of_one_run_costs_at_least_that_run():
    run = gaussian_runs(20.0, 40)
    best = best_of_runs.randomly_stopped(run, mean_runs=1.0)
    assert accountant.epsilon(best, delta=DELTA, adjacency=ADD_REMOVE) >= accountant.epsilon(
        run, delta=DELTA, adjacency=ADD_REMOVE
    )


@pytest.mark.statistical
@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 3.0, math.inf])
def test_number_of_runs_follows_the_priced_distribution(shape: float):
    # Seed 11, 4,000 draws, a chi-squared test of the counts of 0, 1, ... 11 and more: fails for a
    # right distribution with probability 1e-4 a shape.
    mean_runs = 4.0
    rng = np.random.default_rng(11)
    drawn = [
        best_of_runs.number_of_runs(mean_runs=mean_runs, shape=shape, rng=rng) for _ in range(4000)
    ]
    gamma = 0.0 if math.isinf(shape) else best_of_runs._stopping_probability(mean_runs, shape)
    at = np.arange(12)
    chances = {
        0.0: stats.logser(1 - gamma) if shape == 0 else None,
        math.inf: stats.poisson(mean_runs),
    }.get(shape) or stats.nbinom(shape, gamma)
    expected = chances.pmf(at)
    if not math.isinf(shape):
        expected[0] = 0.0
        if shape > 0:
            expected /= 1 - chances.pmf(0)
    expected = np.append(expected, 1 - expected.sum())
    counts = np.bincount(np.minimum(drawn, 12), minlength=13)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    assert stats.chisquare(counts[kept], 4000 * expected[kept]).pvalue > 1e-4


@pytest.mark.parametrize(("mean_runs", "shape"), [(0.5, 1.0), (math.inf, 1.0), (4.0, -0.5)])
def test_impossible_numbers_of_runs_are_refused(mean_runs: float, shape: float):
    with pytest.raises(InputError, match=r"mean_runs=|shape="):
        best_of_runs.randomly_stopped(gaussian_runs(1.0, 1), mean_runs=mean_runs, shape=shape)
    with pytest.raises(InputError, match=r"mean_runs=|shape="):
        best_of_runs.number_of_runs(mean_runs=mean_runs, shape=shape, rng=np.random.default_rng(0))
