"""The simulation of random allocation, which tests use as an oracle."""

from __future__ import annotations

import math

import monte_carlo
import numpy as np
import pytest
from dp_accounting import dp_event
from oracles import binomial

from userdp.accounting import accountant, search
from userdp.errors import InputError
from userdp.units import Adjacency

ADD_REMOVE = Adjacency.ADD_REMOVE


@pytest.mark.statistical
def test_monte_carlo_adds_its_confidence_term():
    # Seed 1. Ten small samples: an estimate without its term falls below the truth in about half of
    # them, one with it in at most 1% of all.
    exact = accountant.epsilon(dp_event.GaussianDpEvent(1.0), delta=0.05, adjacency=ADD_REMOVE)
    for seed in range(10):
        found = monte_carlo.allocation_epsilon(
            steps=1, noise_multiplier=1.0, delta=0.05, samples=5000, confidence=0.999,
            rng=np.random.default_rng([1, seed]),
        )  # fmt: skip
        assert found.epsilon >= exact
    grid = np.geomspace(1e-2, 1e3, 64)
    without_term = grid[np.searchsorted(grid, exact)]
    # Maurer and Pontil's bound is worth at least one point of the grid here.
    assert found.epsilon > without_term


@pytest.mark.parametrize("worse", [True, False])
def test_monte_carlo_takes_the_worse_of_both_directions(worse: bool, monkeypatch):
    drawn = monte_carlo.allocation_losses
    # One direction is made to lose twice as much: whichever it is, it must decide.

    def losses(*, remove: bool, **settings):
        found = drawn(remove=remove, **settings)
        return 2 * found + 3 if remove is worse else found

    def epsilon() -> float:
        return monte_carlo.allocation_epsilon(
            steps=4, noise_multiplier=1.0, delta=0.05, samples=5000, rng=np.random.default_rng(3)
        ).epsilon

    usual = epsilon()
    monkeypatch.setattr(monte_carlo, "allocation_losses", losses)
    assert epsilon() > 1.5 * usual


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
