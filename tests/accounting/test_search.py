"""The fast search against golden numbers, quadrature, closed forms and dp_accounting."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from oracles import binomial, lower_epsilon, one_step_delta

from shared import SHARED, needs_shared
from userdp.accounting import certificate, gaussian, search
from userdp.accounting.pair import Direction, MixturePair
from userdp.accounting.prepared import Branch, Prepared
from userdp.accounting.search import epsilon_bound
from userdp.accounting.steps import Mixture


def golden() -> dict:
    return json.loads((SHARED / "golden" / "accounting.json").read_text())


@needs_shared
def test_epsilons_of_charles_2024_figure_1_are_met_within_tolerance():
    data = golden()["a"]
    for row in data["rows"]:
        found = epsilon_bound([binomial(row["sigma"], row["G"], row["p"], row["T"])], row["delta"])
        rtol = data["rtol_mog"] if row["eps_mog"] < 700 else data["rtol_mog_eps_above_700"]
        assert found == pytest.approx(row["eps_mog"], rel=rtol)


@pytest.mark.parametrize(
    ("mu", "epsilon"),
    [
        (0.3, 0.5),
        (0.3, 2.0),
        (1.0, 0.5),
        (1.0, 2.0),
        (1.0, 8.0),
        (3.0, 2.0),
        (3.0, 8.0),
        (3.0, 40.0),
    ],
)
def test_fft_bound_of_a_gaussian_is_above_the_closed_form_and_close(mu: float, epsilon: float):
    # The whole machinery, on the one mechanism whose delta is known exactly.
    exact = gaussian.log_delta(mu, epsilon)
    steps = 50
    one = np.array([1.0])
    pair = MixturePair.of(math.sqrt(steps) / mu, one, one, tail=1e-130)
    branch = Branch(chance=1.0, pair=pair, quadrature=pair.quadrature(1e-130))
    prepared = [Prepared(branches=(branch,), count=steps)]
    for way in Direction:
        found = math.log(search.delta_at(prepared, way, epsilon, 2e-5, math.exp(exact)))
        assert exact - 1e-9 <= found <= exact + 1e-3 * max(1.0, epsilon**2 / mu**2)


@pytest.mark.parametrize(
    ("noise", "group", "rate", "epsilon"),
    [(1.0, 1, 0.1, 0.5), (0.5, 1, 0.01, 2.0), (2.0, 8, 0.3, 1.5), (5.0, 64, 0.5, 3.0)],
)
def test_one_step_is_above_quadrature_and_close(noise, group, rate, epsilon):
    step = binomial(noise, group, rate, 1)
    exact = one_step_delta(step, epsilon)
    found = search.delta_bound([step], epsilon, hint=exact)
    assert exact * (1 - 1e-9) <= found <= exact * 1.003


def test_full_sampling_is_the_gaussian_mechanism():
    step = Mixture(noise=20.0, shifts=np.array([5.0]), weights=np.array([1.0]), count=10)
    exact = gaussian.epsilon(5 * math.sqrt(10) / 20, 1e-6)
    assert epsilon_bound([step], 1e-6) == pytest.approx(exact, rel=4e-12)


def test_group_of_one_equals_user_sampling():
    users = Mixture(
        noise=1.3, shifts=np.array([0.0, 1.0]), weights=np.array([0.98, 0.02]), count=300
    )
    assert epsilon_bound([binomial(1.3, 1, 0.02, 300)], 1e-6) == pytest.approx(
        epsilon_bound([users], 1e-6), rel=1e-12
    )


def test_splitting_a_run_into_two_parts_changes_nothing():
    whole = epsilon_bound([binomial(1.0, 4, 0.01, 500)], 1e-6)
    parts = epsilon_bound([binomial(1.0, 4, 0.01, 200), binomial(1.0, 4, 0.01, 300)], 1e-6)
    assert parts == pytest.approx(whole, rel=1e-4)


def test_adding_a_gaussian_release_to_training_costs_more_than_either():
    one = np.array([1.0])
    release = Mixture(noise=20.0, shifts=one, weights=one, count=1)
    training = binomial(1.0, 4, 0.01, 500)
    together = epsilon_bound([training, release], 1e-6)
    alone = epsilon_bound([training], 1e-6)
    assert alone < together < alone + epsilon_bound([release], 1e-6 / 2)


@pytest.mark.parametrize("delta", [1e-12, 1e-20, 1e-60])
def test_tiny_delta_gives_a_finite_epsilon_that_grows(delta: float):
    step = binomial(2.0, 16, 0.01, 2000)
    assert epsilon_bound([step], 1e-6) < epsilon_bound([step], delta) < 200


def test_tiny_noise_gives_a_large_finite_epsilon():
    assert 900 < epsilon_bound([binomial(0.0644583, 1, 0.01, 100)], 1e-6) < 1100


def test_epsilon_is_monotone_in_every_argument():
    def at(noise=1.0, group=4, rate=0.01, steps=500, delta=1e-6) -> float:
        return epsilon_bound([binomial(noise, group, rate, steps)], delta)

    for name, values, rising in (
        ("noise", (0.7, 0.9, 1.0, 1.5, 4.0), False),
        ("group", (1, 2, 4, 16, 64), True),
        ("rate", (0.001, 0.005, 0.01, 0.1, 0.9), True),
        ("steps", (1, 10, 499, 500, 501, 5000), True),
        ("delta", (1e-12, 1e-9, 1e-6, 1e-3), False),
    ):
        found = [at(**{name: value}) for value in values]
        assert found == sorted(found, reverse=not rising), name


def random_setting(rng: np.random.Generator) -> tuple[Mixture, float]:
    group = int(2 ** rng.uniform(0, 6))
    rate, steps = 10 ** rng.uniform(-4, -0.3), int(10 ** rng.uniform(0, 3.5))
    # About the noise of a useful epsilon, from too little to a lot.
    noise = (0.5 + group * rate * math.sqrt(steps)) * 10 ** rng.uniform(-0.2, 0.8)
    return binomial(noise, group, rate, steps), 10 ** rng.uniform(-9, -4)


@pytest.mark.parametrize(
    "seed",
    [260, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100))],
)
def test_random_settings_are_never_below_a_lower_bound(seed: int):
    step, delta = random_setting(np.random.default_rng(seed))
    found = epsilon_bound([step], delta)
    assert found >= lower_epsilon(step, delta, max(found, 1e-3)) - 1e-9


@pytest.mark.parametrize(
    ("noise", "group", "rate", "delta"),
    [(0.27, 1, 0.002, 2e-7), (0.5, 1, 0.01, 1e-5), (1.0, 6, 0.05, 1e-4), (0.8, 1, 1e-4, 1e-9)],
)
def test_one_step_is_within_the_stated_error_of_quadrature(noise, group, rate, delta):
    step = binomial(noise, group, rate, 1)
    found = epsilon_bound([step], delta)
    assert one_step_delta(step, found) <= delta * (1 + 1e-9)
    assert one_step_delta(step, found / (1 + certificate.ERROR_BOUND)) > delta


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 200))]
)
def test_a_finer_grid_moves_epsilon_by_less_than_the_stated_error(seed: int):
    step, delta = random_setting(np.random.default_rng([19, seed]))
    found = epsilon_bound([step], delta)
    finer = epsilon_bound([step], delta, tolerance=1e-6)
    assert finer >= found / (1 + certificate.ERROR_BOUND)
