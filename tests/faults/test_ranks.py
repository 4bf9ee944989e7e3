"""Row 11: noise is added once, however many ranks share the buffer of a step."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

from userdp.noise.draw import add_normal_
from userdp.streams import RunSecret

# The noise of a step is drawn by position, so a rank draws its own part of the whole.
SIZE = 4_000_000
STDDEV = 2.5


def drawn_by(ranks: int) -> list[np.ndarray]:
    """The noise of step 5 in as many parts as there are ranks, each drawn alone."""
    streams = RunSecret.fixed_for_tests(11).streams("noise")
    parts = []
    for rank in range(ranks):
        values = torch.zeros(SIZE // ranks)
        first = rank * len(values)
        add_normal_(values, offset=first, size=SIZE, stddev=STDDEV, step=5, streams=streams)
        parts.append(values.numpy())
    return parts


@pytest.fixture(scope="module")
def alone() -> np.ndarray:
    return drawn_by(1)[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_row_11_ranks_together_draw_what_one_draws_alone(ranks: int, alone: np.ndarray) -> None:
    assert np.array_equal(np.concatenate(drawn_by(ranks)), alone)


@pytest.mark.statistical
def test_row_11_every_part_has_the_stated_deviation_and_shares_nothing(alone: np.ndarray) -> None:
    # Seed 11. A million draws a part: 1% is 14 standard errors, and a correlation of 0.004 is 4.
    parts = np.split(alone, 4)
    for part in parts:
        assert part.std() == pytest.approx(STDDEV, rel=0.01)
    for one, other in combinations(parts, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.004
