"""`userdp.bound`: one function for every method, from Python as on the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import userdp
from bounding import graphs
from tiny import make_store
from userdp.bounding.edges import Edges
from userdp.bounding.methods import METHODS
from userdp.bounding.names import BY_TEXT, USER_BY_USER, Method
from userdp.data.store import UserStore
from userdp.errors import InputError

OF_GRAPHS = sorted(set(Method) - BY_TEXT - {Method.MIN_SEPARATION})


def test_every_method_has_its_function() -> None:
    assert set(METHODS) == set(Method)


@pytest.mark.parametrize("method", OF_GRAPHS)
@settings(max_examples=10, deadline=None)
@given(graphs.edges(), st.integers(1, 3))
def test_the_bound_holds_wherever_a_guarantee_is_claimed(method: str, graph: Edges, k: int) -> None:
    bounded = userdp.bound(graph, k, method=method, seed=0)
    assert bounded.selection.guarantee == ("unbounded" not in method)
    if bounded.selection.guarantee:
        assert graphs.fits(graph, bounded.selection.multiplicity, k)
        bounded.selection.check(graph)
    assert bounded.to_json()["size"] == bounded.selection.size


def test_a_path_and_its_edges_give_the_same_selection(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [1, 2, 5, 9])
    by_path = userdp.bound(str(store.path), 2).selection
    assert userdp.bound(store, 2).selection.sha256() == by_path.sha256()
    by_edges = userdp.bound(Edges.load(store.path), 2).selection
    assert by_path.sha256() == by_edges.sha256()
    assert by_path.edges_digest == by_edges.edges_digest


@pytest.mark.parametrize("method", sorted(USER_BY_USER))
def test_with_one_owner_each_a_user_who_leaves_changes_no_other_users_records(
    method: str, tmp_path: Path
) -> None:
    def kept(name: str, sizes: list[int]) -> list[list[str]]:
        store = make_store(tmp_path / name, sizes)
        losses = weights_of_letters if "perplexity" in method else None
        found = userdp.bound(store.path, 2, method=method, losses=losses).selection
        return [texts(store, user, found.multiplicity) for user in range(store.num_users)]

    assert kept("few", [1, 4, 6]) == kept("more", [1, 4, 6, 9])[:3]


def weights_of_letters(store: UserStore) -> np.ndarray:
    return np.array([float(sum(map(ord, text))) for text in store.texts.to_pylist()])


def texts(store: UserStore, user: int, multiplicity: np.ndarray) -> list[str]:
    return [store.text(r) for r in store.records_of(user).tolist() for _ in range(multiplicity[r])]


def test_edges_alone_cannot_be_chosen_by_text() -> None:
    with pytest.raises(InputError, match="holds owners only"):
        userdp.bound(Edges.from_lists([[0]], num_users=1), 1, method="longest")


def test_unknown_words_are_refused() -> None:
    edges = Edges.from_lists([[0]], num_users=1)
    with pytest.raises(InputError, match="method='fairest' is not known; there are 'greedy'"):
        userdp.bound(edges, 1, method="fairest")
    with pytest.raises(InputError, match="engine='cloud' is not known"):
        userdp.bound(edges, 1, engine="cloud")
