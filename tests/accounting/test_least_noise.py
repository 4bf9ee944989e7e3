"""The least noise for a target: the papers' numbers, closed forms, and how close it is."""

from __future__ import annotations

import json
import math
import time
from fractions import Fraction

import numpy as np
import pytest
from oracles import binomial

from shared import SHARED, needs_shared
from userdp.accounting import gaussian, search
from userdp.accounting.least_noise import SMALLEST_NOISE, least_noise
from userdp.accounting.search import epsilon_bound
from userdp.accounting.steps import Exchanged, Mixture, chance_of_moving


def golden() -> dict:
    return json.loads((SHARED / "golden" / "accounting.json").read_text())


@needs_shared
def test_noise_multipliers_of_figures_2_and_9_are_met_within_tolerance():
    for row in golden()["b"]["rows"]:
        for group, rate, expected in (
            (row["G_ELS"], row["p"], row["sigma_ELS"]),
            (1, row["q"], row["sigma_ULS"]),
        ):
            found = least_noise(
                lambda sigma, g=group, r=rate, t=row["T"]: [binomial(sigma, g, r, t)],
                epsilon=row["eps"],
                delta=row["delta"],
            )
            assert found is not None
            assert found.noise_multiplier == pytest.approx(expected, rel=1e-3)


@needs_shared
@pytest.mark.parametrize("part", ["c", "stackoverflow", "ccnews"])
def test_noise_multipliers_of_section_4_stack_overflow_and_cc_news_are_met(part: str):
    data = golden()
    rows = data["c"]["rows"] if part == "c" else data["e"][part]
    for row in rows:
        group, rate = (row["G"], row["p"]) if row.get("kind") == "ELS" else (1, row["q"])
        found = least_noise(
            lambda sigma, g=group, r=rate, t=row["T"]: [binomial(sigma, g, r, t)],
            epsilon=row["eps"],
            delta=row["delta"],
        )
        assert found is not None
        assert found.noise_multiplier == pytest.approx(
            row.get("sigma", row.get("sigma_ULS")), rel=1e-3
        )


def test_calibration_of_random_settings_is_tight_and_fast():
    # Seed 5, 12 settings: no randomness in the outcome. CPU time, not wall time.
    rng = np.random.default_rng(5)
    for _ in range(12):
        group, steps = int(2 ** rng.uniform(0, 8)), int(10 ** rng.uniform(0, 4))
        rate, target = 10 ** rng.uniform(-5, 0), 10 ** rng.uniform(-1, np.log10(64))
        delta = 10 ** rng.uniform(-12, -4)

        def steps_of(sigma, g=group, r=rate, t=steps):
            return [binomial(sigma, g, r, t)]

        start = time.process_time()
        found = least_noise(steps_of, epsilon=target, delta=delta)
        assert time.process_time() - start < 1.0
        assert found is not None
        reached = epsilon_bound(steps_of(found.noise_multiplier), delta)
        assert 0.999 * target <= reached <= 1.0001 * target


def test_noise_beside_a_release_of_fixed_noise_is_the_closed_form():
    # Two Gaussians compose to one: 1/sigma^2 is what the release leaves of mu^2.
    one = np.array([1.0])
    release = Mixture(noise=4.0, shifts=one, weights=one, count=1)

    def beside(sigma: float) -> list[Mixture]:
        return [release, Mixture(noise=sigma, shifts=one, weights=one, count=9)]

    found = least_noise(beside, epsilon=2.0, delta=1e-6)
    assert found is not None
    assert found.noise_multiplier == pytest.approx(
        3 / math.sqrt(gaussian.sensitivity(2.0, 1e-6) ** 2 - 1 / 16), rel=1e-9
    )
    assert epsilon_bound(beside(found.noise_multiplier), 1e-6) == pytest.approx(2.0, rel=1e-9)
    assert least_noise(beside, epsilon=1.0, delta=1e-6) is None


def test_unreachable_target_is_none():
    one = np.array([1.0])
    found = least_noise(
        lambda sigma: [Mixture(noise=sigma, shifts=one, weights=one, count=10**12)],
        epsilon=1e-3,
        delta=1e-9,
    )
    assert found is None


@pytest.mark.parametrize("kind", [Mixture, Exchanged])
@pytest.mark.parametrize(("rate", "count"), [(1e-3, 1), (1e-4, 10), (1e-12, 10), (0.1, 7)])
def test_a_delta_of_the_chance_to_be_drawn_needs_no_noise_and_a_smaller_one_does(kind, rate, count):
    def steps_of(sigma: float) -> list[Mixture | Exchanged]:
        weights = np.array([1 - rate, rate])
        return [kind(noise=sigma, shifts=np.array([0.0, 1.0]), weights=weights, count=count)]

    # In exact arithmetic: the user is drawn at least once.
    chance = 1 - (1 - Fraction(rate)) ** count
    bound = chance_of_moving(steps_of(1.0))
    assert chance <= Fraction(bound) <= chance * (1 + Fraction(1, 10**14))
    start = time.process_time()
    found = least_noise(steps_of, epsilon=1.0, delta=rate * count)
    assert time.process_time() - start < 0.5
    assert found is not None
    assert found.noise_multiplier == SMALLEST_NOISE
    assert epsilon_bound(steps_of(SMALLEST_NOISE), rate * count) == search.NOTHING
    # With little noise every draw shows, so a smaller delta is not met.
    assert epsilon_bound(steps_of(0.1), 0.9 * float(chance)) > 5
