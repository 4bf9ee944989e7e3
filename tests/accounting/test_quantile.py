"""Private quantiles and adaptive clipping: the noise, the answer and the price."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import dp_event

from userdp.accounting import quantile
from userdp.errors import InputError


class Recorded:
    """Stands for a generator: writes down what noise was asked for, and gives it."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.asked: list[tuple[float, int]] = []
        self.given: list[np.ndarray] = []

    def normal(self, *, scale: float, size: int) -> np.ndarray:
        drawn = self.rng.normal(scale=scale, size=size)
        self.asked.append((scale, size))
        self.given.append(drawn)
        return drawn


def test_every_count_of_the_quantile_gets_the_noise_that_is_charged():
    rng = Recorded(0)
    paid = quantile.private_quantile(
        [3.0] * 50, thresholds=[1, 2, 4, 8], quantile=0.5, noise_multiplier=7.0, rng=rng
    )
    assert paid.event == dp_event.GaussianDpEvent(7.0)
    assert rng.asked == [(7.0, 5)]


@pytest.mark.statistical
def test_the_answer_of_the_quantile_is_as_noisy_as_what_is_charged():
    # Two bins of 100 users each, noise s on each count: the answer is the first threshold when its
    # noisy count is at least the other's, and with 10 more users there, with probability
    # Phi(10 / (s sqrt 2)). Seed 5, 4,000 draws, 5 standard errors: fails with probability 1e-6.
    noise, draws = 20.0, 4000
    rng = np.random.default_rng(5)
    values = [1.0] * 110 + [2.0] * 100
    hits = sum(
        quantile.private_quantile(
            values, thresholds=[1, 2], quantile=0.5, noise_multiplier=noise, rng=rng
        ).value
        == 1.0
        for _ in range(draws)
    )
    # A third, empty bin beyond the last threshold holds the positive part of its own noise.
    z = np.random.default_rng(6).normal([110, 100, 0], noise, size=(400_000, 3))
    z = np.maximum(z, 0)
    expected = float((z[:, 0] >= z[:, 1] + z[:, 2]).mean())
    assert abs(hits / draws - expected) < 5 * math.sqrt(expected * (1 - expected) / draws)


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
