"""Connect-the-dots: the discretised pair is easier to tell apart than the real one, everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import binomial, one_step_delta

from userdp.accounting.discretise import Focus, discretise
from userdp.accounting.pair import Direction, Pair


def hockey_stick(atoms, epsilon: float) -> float:
    loss = atoms.spacing * atoms.index + atoms.slack
    over = loss > epsilon
    return float((atoms.mass[over] * -np.expm1(epsilon - loss[over])).sum()) + atoms.infinite


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
    pair = Pair.of(noise, step.shifts, step.weights, tail=1e-14)
    quadrature = pair.quadrature(1e-14)
    focus = Focus(epsilon=epsilon, tilt=tilt, spacing=spacing, allowed=1e-3, resolution=0.05)
    found = max(
        hockey_stick(discretise(pair, quadrature, way, count=1, focus=focus), epsilon)
        for way in Direction
    )
    assert found >= one_step_delta(step, epsilon) * (1 - 1e-8) - 1e-15


@pytest.mark.parametrize("way", list(Direction))
def test_masses_sum_to_one_up_to_their_stated_error(way: Direction):
    step = binomial(1.2, 8, 0.1, 1)
    pair = Pair.of(1.2, step.shifts, step.weights, tail=1e-14)
    focus = Focus(epsilon=1.0, tilt=3.0, spacing=0.01, allowed=1e-4, resolution=0.01)
    atoms = discretise(pair, pair.quadrature(1e-14), way, count=1, focus=focus)
    total = float(atoms.mass.sum()) + atoms.infinite
    assert 1 - 1e-13 <= total <= 1 + 1e-10
    assert atoms.slack < 1e-10


def test_worsened_weights_are_stochastically_larger():
    step = binomial(1.0, 64, 0.3, 1)
    pair = Pair.of(1.0, step.shifts, step.weights, tail=0.0)
    before, after = np.cumsum(step.weights)[:-1], np.cumsum(pair.weights)[:-1]
    assert np.all(after <= before * (1 + 1e-14))
    assert np.all(pair.weights > 0)


def test_cut_off_tail_is_counted_as_lost():
    step = binomial(1.0, 64, 0.01, 1)
    pair = Pair.of(1.0, step.shifts, step.weights, tail=1e-9)
    assert len(pair.shifts) < 65
    assert 0 < pair.lost <= 1e-9 * (1 + 1e-6)
    assert pair.weights.sum() + pair.lost == pytest.approx(1.0, abs=1e-14)
