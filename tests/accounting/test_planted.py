"""Faults that no other test saw: each breaks privacy, and each must make a test here fail."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from scipy import integrate, optimize, stats

from userdp.accounting import accountant, events, monte_carlo, quantile, search, selection, steps
from userdp.accounting.discretise import Focus, discretise
from userdp.accounting.exchange import Exchange
from userdp.accounting.laplace import Laplace
from userdp.accounting.pair import Direction, Pair
from userdp.units import Adjacency

ADD_REMOVE, REPLACE = Adjacency.ADD_REMOVE, Adjacency.REPLACE


def hockey_stick(one, other, epsilon: float, points=()) -> float:
    """The mean of (one - e^epsilon other)+, integrated."""

    def gap(x: float) -> float:
        return max(0.0, one(x) - math.exp(epsilon) * other(x))

    ends = [-40.0, *sorted(points), 40.0]
    parts = [integrate.quad(gap, *pair, limit=400)[0] for pair in pairwise(ends)]
    return sum(parts)


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


@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize("way", list(Direction))
@pytest.mark.parametrize("epsilon", [0.1, 0.5, 0.9])
def test_a_step_of_laplace_noise_costs_its_integral(rate, way, epsilon):
    noise = 1.0
    pair = Laplace(noise=noise, rate=rate)
    focus = Focus(epsilon=epsilon, tilt=1.0, spacing=1e-3, allowed=1e-4, resolution=0.01)
    atoms = discretise(pair, pair.quadrature(1e-12), way, count=1, focus=focus)
    loss = atoms.spacing * atoms.index + atoms.slack
    over = loss > epsilon
    found = float(atoms.mass[over] @ -np.expm1(epsilon - loss[over])) + atoms.infinite

    def without(x: float) -> float:
        return math.exp(-abs(x) / noise) / (2 * noise)

    def with_user(x: float) -> float:
        return (1 - rate) * without(x) + rate * without(x - 1)

    pair_of = (with_user, without) if way is Direction.REMOVE else (without, with_user)
    exact = hockey_stick(*pair_of, epsilon, points=np.linspace(-0.5, 1.5, 41))
    assert exact * (1 - 1e-6) - 1e-12 <= found <= exact * 1.01 + 1e-6


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


# Tails are cut at 1e-3 here, which no run does, so that they show.
CUT = 1e-3


@pytest.mark.parametrize("way", list(Direction))
@pytest.mark.parametrize("kind", [Pair, Exchange])
def test_outputs_beyond_the_grid_count_as_infinite(kind, way):
    noise, shifts, weights = 1.0, np.array([1.0]), np.array([1.0])
    if kind is Exchange:
        shifts, weights = np.array([0.0, 1.0]), np.array([0.5, 0.5])
    pair = kind.of(noise, shifts, weights, tail=CUT)
    focus = Focus(epsilon=1.0, tilt=2.0, spacing=0.01, allowed=1e-3, resolution=0.01)
    atoms = discretise(pair, pair.quadrature(CUT), way, count=1, focus=focus)
    # At an epsilon beyond the grid nothing is left but what the outputs beyond it give.
    epsilon = atoms.spacing * (int(atoms.index[-1]) + 50)
    sign = 1 if kind is Exchange else 0

    def density(side: int):
        return lambda x: sum(
            w * stats.norm.pdf(x, side * s if side else 0.0, noise)
            for s, w in zip(shifts, weights, strict=True)
        )

    one, other = density(1), density(-sign)
    exact = hockey_stick(one, other, epsilon, [2, 4, 6])
    assert exact > 0
    assert atoms.infinite >= exact


@pytest.mark.parametrize("cap", [math.inf, 0.7])
@pytest.mark.parametrize("spacing", [0.01, 1.5])
@pytest.mark.parametrize("way", list(Direction))
@pytest.mark.parametrize("kind", [Pair, Exchange])
def test_a_step_on_a_grid_dominates_its_integral_at_every_epsilon(kind, way, spacing, cap):
    # A cap, and a grid so coarse that its last edge is far above the last output's loss.
    noise, shifts, weights = 1.0, np.array([0.0, 1.0]), np.array([0.5, 0.5])
    pair = kind.of(noise, shifts, weights, tail=1e-6)
    focus = Focus(epsilon=0.5, tilt=2.0, spacing=spacing, allowed=1e-3, resolution=0.01, cap=cap)
    atoms = discretise(pair, pair.quadrature(1e-3), way, count=1, focus=focus)
    loss = atoms.spacing * atoms.index + atoms.slack

    # The ratio of the neighbours increases with the output, so the best test is a threshold.
    def above(sign: float, x: float) -> float:
        return float(weights @ stats.norm.sf(x, sign * shifts, noise))

    def log_density(sign: float, x: float) -> float:
        return math.log(weights @ stats.norm.pdf(x, sign * shifts, noise))

    mirror = -1.0 if kind is Exchange else 0.0
    last = float(loss[-1])
    for epsilon in [0.0, 0.2, 0.5, 0.68, last - 0.01, last, last + 0.01, last + 0.3]:
        signed = epsilon if way is Direction.REMOVE else -epsilon
        if signed <= pair.least_loss:
            continue

        def gap(x: float, signed=signed) -> float:
            return log_density(1.0, x) - log_density(mirror, x) - signed

        x = optimize.brentq(gap, -20.0, 20.0, xtol=1e-12)
        one, other = above(1.0, x), above(mirror, x)
        if way is Direction.ADD:
            one, other = 1 - other, 1 - one
        exact = one - math.exp(epsilon) * other
        over = loss > epsilon
        found = float(atoms.mass[over] @ -np.expm1(epsilon - loss[over])) + atoms.infinite
        assert found >= exact - 1e-12, epsilon


def test_components_cut_from_the_mixture_count_as_infinite():
    shifts, weights = np.array([0.0, 1.0, 30.0]), np.array([0.6, 0.3999, 0.0001])
    for kind in (Pair, Exchange):
        pair = kind.of(1.0, shifts, weights, tail=CUT)
        assert len(pair.shifts) == 2
        focus = Focus(epsilon=1.0, tilt=2.0, spacing=0.01, allowed=1e-3, resolution=0.01)
        for way in Direction if kind is Exchange else [Direction.REMOVE]:
            found = discretise(pair, pair.quadrature(1e-9), way, count=1, focus=focus)
            assert found.infinite >= 1e-4


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
                found = selection.number_of_runs(mean_runs=mean_runs, rng=Fixed(value))
                assert found == expected
    assert selection.number_of_runs(mean_runs=1.0, rng=Fixed(0.999)) == 1


def test_random_stopping_is_priced_for_the_mean_that_is_drawn():
    # Papernot and Steinke 2022, Thm. 2 with eta = 1: at order a, e + 2 min_b ((1 - 1/b) e_b +
    # log(mean) / b) + log(mean) / (a - 1), here for one Gaussian, e_a = a / (2 sigma^2).
    mean_runs, noise, delta = 10.0, 8.0, 1e-5
    event = selection.randomly_stopped(dp_event.GaussianDpEvent(noise), mean_runs=mean_runs)
    found = accountant.epsilon(event, delta=delta, adjacency=ADD_REMOVE)
    orders = np.linspace(1.05, 400, 100_000)
    run = orders / (2 * noise**2)
    constant = 2 * float(np.min((1 - 1 / orders) * run + math.log(mean_runs) / orders))
    stopped = run + constant + math.log(mean_runs) / (orders - 1)
    exact = float(np.min(stopped + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)))
    assert exact * 0.999 <= found <= 1.02 * exact
    once = RdpAccountant().compose(dp_event.GaussianDpEvent(noise)).get_epsilon(delta)
    assert found > 1.5 * once


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


def test_a_mechanism_without_noise_has_no_finite_epsilon():
    for event in (
        dp_event.NonPrivateDpEvent(),
        dp_event.GaussianDpEvent(0.0),
        dp_event.LaplaceDpEvent(0.0),
        events.combined([dp_event.GaussianDpEvent(1.0), dp_event.NonPrivateDpEvent()]),
    ):
        assert steps.has_no_privacy(event)
        assert accountant.epsilon(event, delta=1e-6, adjacency=ADD_REMOVE) == math.inf
