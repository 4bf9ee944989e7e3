from __future__ import annotations

import json
import math

import pytest
from scipy import integrate, stats

from shared import SHARED, needs_shared
from userdp.accounting import accountant, events, gaussian
from userdp.units import Adjacency


@needs_shared
def test_min_separated_epsilons_match_golden():
    for row in json.loads((SHARED / "golden" / "accounting.json").read_text())["f"]["eps"]:
        event = events.min_separated_gaussian(
            participations=row["k"], noise_multiplier=row["sigma"]
        )
        found = accountant.epsilon(event, delta=row["delta"], adjacency=Adjacency.ADD_REMOVE)
        assert found == pytest.approx(row["eps"], rel=1e-4)


@needs_shared
def test_min_separated_noise_matches_golden():
    for row in json.loads((SHARED / "golden" / "accounting.json").read_text())["f"]["sigma"]:
        found = accountant.calibrate(
            lambda sigma, k=row["k"]: events.min_separated_gaussian(
                participations=k, noise_multiplier=sigma
            ),
            target=row["eps"],
            delta=row["delta"],
            adjacency=Adjacency.ADD_REMOVE,
        )
        assert found == pytest.approx(row["sigma"], rel=1e-4)


@pytest.mark.parametrize(("mu", "epsilon"), [(0.5, 0.2), (1.0, 1.0), (2.0, 3.0), (1.0, 6.0)])
def test_delta_is_the_integral_of_the_difference_of_densities(mu: float, epsilon: float):
    at = mu / 2 + epsilon / mu

    def gap(x: float) -> float:
        return stats.norm.pdf(x, mu) - math.exp(epsilon) * stats.norm.pdf(x)

    exact, _ = integrate.quad(gap, at, at + 30, epsabs=0, epsrel=1e-11)
    assert math.exp(gaussian.log_delta(mu, epsilon)) == pytest.approx(exact, rel=1e-8)


@pytest.mark.parametrize("delta", [1e-3, 1e-9, 1e-30])
def test_sensitivity_and_epsilon_are_inverse(delta: float):
    assert gaussian.epsilon(gaussian.sensitivity(2.0, delta), delta) == pytest.approx(2.0, rel=1e-9)
