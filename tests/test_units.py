"""Who is protected: the words each neighbour relation stands for."""

from __future__ import annotations

import pytest

from userdp.errors import InputError
from userdp.units import Adjacency


@pytest.mark.parametrize(
    ("adjacency", "word"),
    [
        (Adjacency.ADD_REMOVE, "absent"),
        (Adjacency.ZERO_OUT, "nothing"),
        (Adjacency.REPLACE, "exchanged"),
    ],
)
def test_each_adjacency_has_its_words(adjacency: Adjacency, word: str) -> None:
    assert word in adjacency.meaning


@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_every_adjacency_has_a_meaning_and_a_promise(adjacency: Adjacency) -> None:
    assert adjacency.meaning
    assert adjacency.promise.startswith("Even if every")
    assert ("public" in adjacency.meaning) == adjacency.fixed_graph
    assert ("sent or received" in adjacency.promise) == adjacency.fixed_graph


def test_node_privacy_is_refused_with_the_reason() -> None:
    with pytest.raises(InputError, match=r"node privacy .* not offered"):
        Adjacency("node")


def test_other_unknown_adjacencies_stay_plain_value_errors() -> None:
    with pytest.raises(ValueError, match="is not a valid Adjacency"):
        Adjacency("edge")
