"""Pairs that are given as a list of losses go through the same grid as all others."""

from __future__ import annotations

import math

import numpy as np
import pytest

from userdp.accounting.discretise import Focus, discretise
from userdp.accounting.listed import Listed
from userdp.accounting.pair import Direction

Q = np.array([0.1, 0.2, 0.3, 0.25])
LOSS = np.array([-1.7, -0.4, 0.15, 0.6])
# Only P has 0.11 and only Q has 0.15.
ONLY_Q = 0.15
PAIR = Listed(
    loss=LOSS, p=Q * np.exp(LOSS), q=Q, lost=1 - float(Q @ np.exp(LOSS)), only_q=ONLY_Q,
    relative=1e-15, slack=1e-14,
)  # fmt: skip


def exact(direction: Direction, epsilon: float) -> float:
    if direction is Direction.REMOVE:
        return float(np.maximum(PAIR.p - math.exp(epsilon) * PAIR.q, 0).sum()) + PAIR.lost
    return float(np.maximum(PAIR.q - math.exp(epsilon) * PAIR.p, 0).sum()) + PAIR.only_q


@pytest.mark.parametrize("way", list(Direction))
@pytest.mark.parametrize("cap", [math.inf, 0.5])
def test_a_list_on_a_grid_dominates_itself_and_is_close(way: Direction, cap: float):
    focus = Focus(epsilon=0.3, tilt=2.0, spacing=1e-3, allowed=1e-6, resolution=1e-3, cap=cap)
    atoms = discretise(PAIR, PAIR.quadrature(1e-12), way, count=1, focus=focus)
    loss = atoms.spacing * atoms.index + atoms.slack
    for epsilon in (0.0, 0.1, 0.3, 0.5):
        over = loss > epsilon
        found = float((atoms.mass[over] * -np.expm1(epsilon - loss[over])).sum()) + atoms.infinite
        true = exact(way, epsilon)
        assert true * (1 - 1e-12) <= found <= true + 0.05


def test_what_only_one_neighbour_has_is_infinite_loss_in_one_direction():
    x = np.array([-2.0, 0.0, 1.0])
    q, _ = PAIR.mass_of_q(x)
    p, _ = PAIR.mass_of_p(x)
    assert q == pytest.approx([ONLY_Q, 0.3, 0.55, 0.0])
    assert p.sum() + PAIR.lost == pytest.approx(1.0)
    assert PAIR.least_loss == -math.inf
