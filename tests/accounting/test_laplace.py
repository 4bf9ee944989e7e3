"""Laplace noise against the integral of its densities."""

from __future__ import annotations

import math

import numpy as np
import pytest
from oracles import hockey_stick

from userdp.accounting.discretise import Focus, discretise
from userdp.accounting.laplace import Laplace
from userdp.accounting.pair import Direction


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
