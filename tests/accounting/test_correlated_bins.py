"""Balls in bins with correlated noise: proven and simulated bounds, never below the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from userdp.accounting import accountant, certificate, correlated_bins, events, gaussian
from userdp.accounting.own_events import BallsInBinsBandedDpEvent
from userdp.errors import InputError, UnaccountedPlanError
from userdp.units import Adjacency

ADD_REMOVE = Adjacency.ADD_REMOVE


def banded(bins: int, gram: list[float], noise: float) -> BallsInBinsBandedDpEvent:
    event = events.balls_in_bins_banded(bins=bins, gram=gram, noise_multiplier=noise)
    assert isinstance(event, BallsInBinsBandedDpEvent)
    return event


def two_bins(g: float, r: float, noise: float, epsilon: float) -> float:
    """delta of two bins with this covariance, integrated over both, in the worse direction."""
    z = np.linspace(-9, 9, 901)
    mass = stats.norm.pdf(z) * (z[1] - z[0])
    k, c = g / noise**2, r / noise**2
    first = math.sqrt(k) * z
    second = np.add.outer(c / k * first, math.sqrt(k - c**2 / k) * z)
    weight = np.multiply.outer(mass, mass)
    ratio = (np.exp(first - k / 2)[:, None] + np.exp(second - k / 2)) / 2
    remove = (weight * np.maximum(ratio - math.exp(epsilon), 0)).sum()
    add = (weight * np.maximum(1 - math.exp(epsilon) * ratio, 0)).sum()
    return float(max(remove, add))


def _epsilon(delta_at, delta: float) -> float:
    low, high = 0.0, 30.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return high


@pytest.mark.statistical
@pytest.mark.parametrize(
    "share", [0.5, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.0, 0.9))]
)
def test_two_bins_cost_what_integration_says(share: float, monkeypatch):
    # The seed follows from the numbers. A simulated bound is too small with probability 1e-9.
    monkeypatch.setattr(correlated_bins, "_DRAWN", 2_000_000)
    event = banded(2, [1.0, share] if share else [1.0], 1.5)
    true = _epsilon(lambda epsilon: two_bins(1.0, share, 1.5, epsilon), 1e-3)
    proven = [
        certificate.evaluate(one, delta=1e-3, adjacency=ADD_REMOVE).epsilon
        for one in correlated_bins.proven(event)
    ]
    assert min(proven) >= true * (1 - 1e-6)
    # Two bins are exchangeable, so the proven bound is exact for them.
    assert min(proven) <= true * 1.001
    correlated_bins.simulated.cache_clear()
    simulated = correlated_bins.simulated(event, 1e-3, 10.0)
    assert simulated is not None
    assert true <= simulated <= 1.05 * true


@pytest.mark.statistical
def test_few_draws_are_paid_for(monkeypatch):
    # The seed follows from the numbers. Without a confidence term both would be about the truth.
    event = banded(2, [1.0, 0.5], 1.5)
    true = _epsilon(lambda epsilon: two_bins(1.0, 0.5, 1.5, epsilon), 0.02)
    found = []
    for drawn in (20_000, 200_000):
        monkeypatch.setattr(correlated_bins, "_DRAWN", drawn)
        correlated_bins.simulated.cache_clear()
        found.append(correlated_bins.simulated(event, 0.02, 10.0))
    assert found[0] > 1.03 * found[1] > 1.03 * true


def test_bins_that_share_no_noise_are_an_allocation():
    event = banded(12, [4.0], 2.0)
    alone = events.balls_in_bins_gaussian(bins=12, rounds=4, noise_multiplier=2.0)
    found, exact = (
        certificate.evaluate(one, delta=1e-6, adjacency=ADD_REMOVE).epsilon
        for one in (event, alone)
    )
    assert found == exact


def test_bins_that_share_all_noise_are_the_gaussian_mechanism():
    event = banded(4, [4.0, 4.0, 4.0], 2.0)
    found = certificate.evaluate(event, delta=1e-6, adjacency=ADD_REMOVE).epsilon
    assert found == pytest.approx(gaussian.epsilon(1.0, 1e-6), rel=1e-5)


@pytest.mark.parametrize(("steps", "bands", "bins"), [(12, 3, 4), (11, 4, 3), (10, 2, 5)])
def test_the_numbers_bound_all_inner_products_and_are_a_covariance(steps, bands, bins):
    rng = np.random.default_rng(steps)
    columns = rng.uniform(-0.3, 1.0, (steps, bands))
    columns[np.add.outer(np.arange(steps), np.arange(bands)) >= steps] = 0
    dense = np.zeros((steps, steps))
    for s in range(steps):
        dense[s : s + bands, s] = np.abs(columns[s, : steps - s])
    whole = np.stack([dense[:, j::bins].sum(axis=1) for j in range(bins)], axis=1)
    gram = correlated_bins.gram_of(columns, bins)
    row = correlated_bins.row_of(banded(bins, list(gram), 1.0))
    circulant = np.array([[row[(j - i) % bins] for j in range(bins)] for i in range(bins)])
    assert (circulant >= whole.T @ whole).all()
    assert np.linalg.eigvalsh(circulant).min() >= -1e-12


@pytest.mark.statistical
def test_never_below_a_simulation_with_vectors_that_turn(monkeypatch):
    # Seed 0; Maurer and Pontil 2009, failing with probability 1e-6 each.
    monkeypatch.setattr(correlated_bins, "_DRAWN", 1_000_000)
    correlated_bins.simulated.cache_clear()
    steps, bins, noise, delta, samples = 9, 3, 1.2, 0.02, 200_000
    coefficients = np.array([0.8, 0.5, math.sqrt(0.11)])
    columns = np.tile(coefficients, (steps, 1))
    columns[np.add.outer(np.arange(steps), np.arange(3)) >= steps] = 0
    event = banded(bins, list(correlated_bins.gram_of(columns, bins)), noise)
    found = accountant.evaluate(event, delta=delta, adjacency=ADD_REMOVE)
    dense = np.zeros((steps, steps))
    for s in range(steps):
        dense[s : s + 3, s] = columns[s, : steps - s]
    rng = np.random.default_rng(0)
    log = math.log(2 / 1e-6)
    for angles in (np.zeros(steps), np.arange(steps) * math.pi / 2, rng.uniform(0, 7, steps)):
        directions = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        means = np.stack(
            [(dense[:, j::bins] @ directions[j::bins]).ravel() for j in range(bins)], axis=0
        )
        for remove in (True, False):
            x = noise * rng.normal(size=(samples, means.shape[1]))
            x += means[rng.integers(bins, size=samples)] if remove else 0
            exponent = x @ means.T / noise**2 - (means**2).sum(axis=1) / (2 * noise**2)
            loss = np.log(np.exp(exponent).mean(axis=1)) * (1 if remove else -1)
            values = -np.expm1(np.minimum(found.epsilon - loss, 0.0))
            margin = math.sqrt(2 * values.var(ddof=1) * log / samples) + 7 * log / (3 * samples)
            assert values.mean() - margin <= delta


def test_the_confidence_bound_covers_the_mean():
    # P(Binomial(n, p) / n <= mean) must be at most the failure probability at the bound.
    for mean, samples in ((0.0, 50), (0.02, 1000), (0.5, 200)):
        bound = correlated_bins.above(mean, samples, 1e-3)
        assert stats.binom.cdf(round(mean * samples), samples, bound) <= 1e-3 * (1 + 1e-9)
        assert bound < mean + 5 * math.sqrt(mean / samples) + 10 / samples


def test_a_simulated_price_says_so_and_is_the_same_again(monkeypatch):
    monkeypatch.setattr(correlated_bins, "_DRAWN", 1_000_000)
    event = banded(8, [2.0, 1.0, 0.3], 2.0)
    found = []
    for _ in range(2):
        correlated_bins.simulated.cache_clear()
        found.append(accountant.evaluate(event, delta=1e-2, adjacency=ADD_REMOVE))
    assert found[0] == found[1]
    assert "Monte Carlo, confidence 1 - 1e-09" in found[0].certified_by
    # So small a delta is proven, not simulated.
    small = accountant.evaluate(event, delta=1e-12, adjacency=ADD_REMOVE)
    assert "Monte Carlo" not in small.certified_by


def test_calibrated_noise_meets_the_target_by_the_simulated_price(monkeypatch):
    monkeypatch.setattr(correlated_bins, "_DRAWN", 200_000)
    correlated_bins.simulated.cache_clear()

    def event_of(noise: float) -> events.DpEvent:
        return banded(8, [2.0, 1.0, 0.3], noise)

    noise = accountant.calibrate(event_of, target=1.5, delta=1e-2, adjacency=ADD_REMOVE)
    reached = accountant.epsilon(event_of(noise), delta=1e-2, adjacency=ADD_REMOVE)
    assert 1.45 < reached <= 1.5


def test_with_others_the_proven_price_is_composed():
    event = banded(8, [2.0, 1.0, 0.3], 2.0)
    other = events.poisson_users_gaussian(user_sampling_prob=0.1, noise_multiplier=2.0)
    both = accountant.evaluate(events.combined([event, other]), delta=1e-2, adjacency=ADD_REMOVE)
    alone = certificate.evaluate(event, delta=1e-2, adjacency=ADD_REMOVE)
    assert both.epsilon > alone.epsilon
    assert "Monte Carlo" not in both.certified_by
    with pytest.raises(UnaccountedPlanError):
        accountant.evaluate(event, delta=1e-2, adjacency=Adjacency.REPLACE)


@pytest.mark.parametrize("gram", [[], [0.0], [1.0, -0.5], [1.0] * 6])
def test_impossible_numbers_are_refused(gram: list[float]):
    with pytest.raises(InputError, match="gram"):
        events.balls_in_bins_banded(bins=8, gram=gram, noise_multiplier=1.0)


# Bins, steps, bands, noise, epsilon; then delta and its standard error by jax_privacy 2.0.0
# (`monte_carlo.sample_generation.get_privacy_loss_sample`, seed 7, 60,000 draws), with C's column
# 0.7^j, of norm 1. Its "remove" direction is the worse one in all of them.
OF_JAX_PRIVACY = [
    (16, 64, 1, 2.0, 1.0, 6.980e-4, 5.83e-5),
    *(
        pytest.param(*numbers, marks=pytest.mark.slow)
        for numbers in (
            (16, 64, 4, 2.0, 1.0, 9.065e-3, 2.133e-4),
            (20, 60, 3, 1.5, 1.5, 1.286e-3, 8.01e-5),
            (8, 32, 3, 3.0, 0.8, 5.141e-3, 1.402e-4),
        )
    ),
]


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("bins", "steps", "bands", "noise", "epsilon", "delta", "error"), OF_JAX_PRIVACY
)
def test_the_price_is_that_of_jax_privacy(
    bins: int, steps: int, bands: int, noise: float, epsilon: float, delta: float, error: float
) -> None:
    if bands == 1:
        event = events.balls_in_bins_gaussian(
            bins=bins, rounds=steps // bins, noise_multiplier=noise
        )
    else:
        columns = np.tile(0.7 ** np.arange(bands), (steps, 1))
        columns /= np.linalg.norm(columns[0])
        for band in range(bands):
            columns[steps - band :, band] = 0
        event = banded(bins, list(correlated_bins.gram_of(columns, bins)), noise)
    # The stored numbers are within four standard errors of the truth, but for 6e-5.
    assert accountant.epsilon(event, delta=delta - 4 * error, adjacency=ADD_REMOVE) >= epsilon
    # A simulated price has a confidence of 1e-9, which costs a few hundredths.
    near = accountant.epsilon(event, delta=delta + 4 * error, adjacency=ADD_REMOVE)
    assert near <= (1.0 if bands == 1 else 1.05) * epsilon
