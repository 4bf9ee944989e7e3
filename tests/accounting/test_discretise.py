"""Connect-the-dots: the discretised pair is easier to tell apart than the real one, everywhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import binomial, hockey_stick, one_step_delta
from scipy import optimize, stats

from userdp.accounting.discretise import Focus, discretise
from userdp.accounting.exchange import Exchange
from userdp.accounting.pair import Direction, MixturePair


def delta_of(atoms, epsilon: float) -> float:
    loss = atoms.spacing * atoms.index + atoms.slack
    over = loss > epsilon
    return float((atoms.mass[over] * -np.expm1(epsilon - loss[over])).sum()) + atoms.infinite


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    noise=st.floats(0.3, 6.0),
    group=st.integers(1, 40),
    rate=st.floats(1e-3, 0.9),
    spacing=st.floats(1e-3, 0.1),
    tilt=st.floats(0.1, 30.0),
    epsilon=st.floats(0.05, 5.0),
)
def test_discretised_step_dominates_the_real_one(noise, group, rate, spacing, tilt, epsilon):
    step = binomial(noise, group, rate, 1)
    pair = MixturePair.of(noise, step.shifts, step.weights, tail=1e-14)
    quadrature = pair.quadrature(1e-14)
    focus = Focus(epsilon=epsilon, tilt=tilt, spacing=spacing, allowed=1e-3, resolution=0.05)
    found = max(
        delta_of(discretise(pair, quadrature, way, count=1, focus=focus), epsilon)
        for way in Direction
    )
    assert found >= one_step_delta(step, epsilon) * (1 - 1e-8) - 1e-15


@pytest.mark.parametrize("way", list(Direction))
def test_masses_sum_to_one_up_to_their_stated_error(way: Direction):
    step = binomial(1.2, 8, 0.1, 1)
    pair = MixturePair.of(1.2, step.shifts, step.weights, tail=1e-14)
    focus = Focus(epsilon=1.0, tilt=3.0, spacing=0.01, allowed=1e-4, resolution=0.01)
    atoms = discretise(pair, pair.quadrature(1e-14), way, count=1, focus=focus)
    total = float(atoms.mass.sum()) + atoms.infinite
    assert 1 - 1e-13 <= total <= 1 + 1e-10
    assert atoms.slack < 1e-10


def test_worsened_weights_are_stochastically_larger():
    step = binomial(1.0, 64, 0.3, 1)
    pair = MixturePair.of(1.0, step.shifts, step.weights, tail=0.0)
    before, after = np.cumsum(step.weights)[:-1], np.cumsum(pair.weights)[:-1]
    assert np.all(after <= before * (1 + 1e-14))
    assert np.all(pair.weights > 0)


def test_cut_off_tail_is_counted_as_lost():
    step = binomial(1.0, 64, 0.01, 1)
    pair = MixturePair.of(1.0, step.shifts, step.weights, tail=1e-9)
    assert len(pair.shifts) < 65
    assert 0 < pair.lost <= 1e-9 * (1 + 1e-6)
    assert pair.weights.sum() + pair.lost == pytest.approx(1.0, abs=1e-14)


# Tails are cut at 1e-3 here, which no run does, so that they show.
CUT = 1e-3


@pytest.mark.parametrize("way", list(Direction))
@pytest.mark.parametrize("kind", [MixturePair, Exchange])
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
@pytest.mark.parametrize("kind", [MixturePair, Exchange])
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
    for kind in (MixturePair, Exchange):
        pair = kind.of(1.0, shifts, weights, tail=CUT)
        assert len(pair.shifts) == 2
        focus = Focus(epsilon=1.0, tilt=2.0, spacing=0.01, allowed=1e-3, resolution=0.01)
        for way in Direction if kind is Exchange else [Direction.REMOVE]:
            found = discretise(pair, pair.quadrature(1e-9), way, count=1, focus=focus)
            assert found.infinite >= 1e-4
