"""Nothing peeks for free: quantiles, adaptive clipping, tuning, the filter, random allocation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from oracles import binomial

from userdp.accounting import (
    accountant,
    events,
    filter,
    monte_carlo,
    quantile,
    renyi,
    search,
    selection,
)
from userdp.clipping.rules import AdaptiveClip
from userdp.errors import InputError
from userdp.units import Adjacency


@pytest.mark.statistical
def test_private_median_of_many_users_is_the_median_bin():
    # Seed 0. 2,000 users, noise 10 on each of 11 counts: a wrong bin needs a 20-sigma error.
    rng = np.random.default_rng(0)
    values = np.concatenate([np.full(900, 3.0), np.full(500, 12.0), np.full(600, 300.0)])
    paid = quantile.private_quantile(
        values,
        thresholds=[2.0**k for k in range(10)],
        quantile=0.5,
        noise_multiplier=10.0,
        rng=rng,
    )
    assert paid.value == 16.0
    assert paid.event == dp_event.GaussianDpEvent(10.0)


def test_histogram_moves_by_one_when_a_user_leaves():
    # The released vector is the histogram: same noise, one user less, L2 distance at most 1.
    edges = [1.0, 2.0, 4.0]
    values = [0.5, 1.5, 3.0, 9.0]

    def counts(data: list[float]) -> np.ndarray:
        return np.bincount(np.searchsorted(edges, data, side="left"), minlength=4)

    for left_out in range(4):
        rest = values[:left_out] + values[left_out + 1 :]
        assert np.linalg.norm(counts(values) - counts(rest)) == 1.0


@pytest.mark.parametrize(
    "wrong", [{"quantile": 0.0}, {"noise_multiplier": 0.0}, {"thresholds": [2.0, 1.0]}]
)
def test_wrong_quantile_requests_are_refused(wrong):
    request = {"thresholds": [1.0, 2.0], "quantile": 0.5, "noise_multiplier": 1.0} | wrong
    with pytest.raises(InputError):
        quantile.private_quantile([1.0], rng=np.random.default_rng(0), **request)


def test_adaptive_clipping_prices_both_releases_as_one_gaussian():
    z, count_noise = 0.8, 4.0
    on_updates = quantile.adaptive_clipping_noise(noise_multiplier=z, count_noise=count_noise)
    # Sensitivities 1 and 1/2 in units of their noise add in squares.
    assert 1 / on_updates**2 + 1 / (2 * count_noise) ** 2 == pytest.approx(1 / z**2)
    with pytest.raises(InputError, match="count_noise"):
        quantile.adaptive_clipping_noise(noise_multiplier=1.0, count_noise=0.5)


def test_clip_norm_shrinks_when_too_few_are_clipped():
    rule = AdaptiveClip(clip_norm=1.0, count_noise=5.0, target_quantile=0.5)
    assert rule.following(noisy_share_within=0.9).clip_norm < 1.0
    assert rule.following(noisy_share_within=0.1).clip_norm > 1.0


def test_random_stopping_costs_more_than_one_run_and_less_than_all():
    run = events.repeated(
        events.poisson_users_gaussian(user_sampling_prob=0.01, noise_multiplier=1.0), 100
    )

    def rdp(event: events.DpEvent) -> float:
        return renyi.evaluation(event, delta=1e-6, adjacency=Adjacency.ADD_REMOVE).epsilon

    best = rdp(selection.randomly_stopped(run, mean_runs=100.0))
    assert rdp(run) < best < rdp(selection.swept(run, 100))


def test_paid_planning_and_training_compose_exactly():
    training = events.repeated(
        events.poisson_users_gaussian(user_sampling_prob=0.01, noise_multiplier=1.0), 200
    )
    both = events.combined([training, dp_event.GaussianDpEvent(20.0)])
    alone = accountant.epsilon(training, delta=1e-6, adjacency=Adjacency.ADD_REMOVE)
    together = accountant.epsilon(both, delta=1e-6, adjacency=Adjacency.ADD_REMOVE)
    assert alone < together < alone + 0.3


def test_filter_splits_the_budget_in_halves():
    plan = filter.filter_plan(epsilon=3.0, delta=1e-5, steps=100, num_users=1000, concentration=0.1)
    event = events.repeated(dp_event.GaussianDpEvent(plan.noise_multiplier), 100)
    spent = accountant.epsilon(event, delta=plan.delta / 2, adjacency=Adjacency.ADD_REMOVE)
    assert spent == pytest.approx(plan.epsilon / 2, rel=1e-3)
    variance = 8 * 0.1**2 * math.log(math.exp(3.0) * 100 / 1e-5) * plan.noise_multiplier**2 / 1e6
    assert plan.noise_stddev == pytest.approx(math.sqrt(variance))


@pytest.mark.statistical
def test_one_bin_is_the_gaussian_mechanism_within_its_confidence():
    # Seed 1, confidence 0.999 per call: fails for correct code with probability at most 0.001.
    found = monte_carlo.allocation_epsilon(
        steps=1, noise_multiplier=2.0, delta=1e-2, samples=200_000, rng=np.random.default_rng(1)
    )
    exact = search.gaussian.epsilon(0.5, 1e-2)
    assert exact <= found.epsilon < 1.5 * exact
    assert "not a certificate" in found.certified_by


@pytest.mark.statistical
def test_balls_in_bins_beats_poisson_at_low_noise():
    # Seed 2, confidence 0.999. Poisson may pick a user more than once; balls in bins never does.
    found = monte_carlo.allocation_epsilon(
        steps=10, noise_multiplier=0.5, delta=1e-2, samples=100_000, rng=np.random.default_rng(2)
    )
    poisson = search.epsilon_bound([binomial(0.5, 1, 0.1, 10)], 1e-2)
    assert found.epsilon < 1.2 * poisson


def test_symmetric_polynomials_match_brute_force():
    from itertools import combinations

    y = np.random.default_rng(3).uniform(0.1, 3.0, size=(1, 7))
    for degree in (1, 2, 3, 7):
        exact = sum(math.prod(y[0, list(pick)]) for pick in combinations(range(7), degree))
        found = monte_carlo._log_symmetric(np.log(y), degree)
        assert math.exp(float(found[0])) == pytest.approx(exact)


def test_too_small_a_sample_is_refused_not_guessed():
    with pytest.raises(InputError, match="samples"):
        monte_carlo.allocation_epsilon(
            steps=10, noise_multiplier=1.0, delta=1e-6, samples=1000, rng=np.random.default_rng(0)
        )
