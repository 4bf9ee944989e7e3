"""Who is protected: the words and the factor each neighbour relation stands for."""

from __future__ import annotations

import pytest

from userdp.units import Adjacency


@pytest.mark.parametrize(
    ("adjacency", "factor", "word"),
    [
        (Adjacency.ADD_REMOVE, 1.0, "absent"),
        (Adjacency.ZERO_OUT, 1.0, "nothing"),
        (Adjacency.REPLACE, 2.0, "exchanged"),
    ],
)
def test_each_adjacency_has_its_factor_and_its_words(
    adjacency: Adjacency, factor: float, word: str
) -> None:
    assert adjacency.sensitivity_factor == factor
    assert word in adjacency.meaning
