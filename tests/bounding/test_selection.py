from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from userdp.bounding.edges import Edges
from userdp.bounding.selection import Selection
from userdp.errors import InputError

GRAPH = Edges.from_lists([[0, 1], [1], [2]], num_users=3)


def test_a_saved_selection_comes_back_and_checks(tmp_path: Path) -> None:
    chosen = Selection.of(GRAPH, np.array([1, 2, 0]), 5, method="greedy-duplicates")
    chosen.save(tmp_path / "sel.npz")
    assert (tmp_path / "sel.npz").stat().st_mode & 0o777 == 0o600
    back = Selection.load(tmp_path / "sel.npz")
    back.check(GRAPH)
    assert back.records().tolist() == [0, 1, 1]
    assert (back.size, back.distinct, back.realised_bound) == (3, 2, 3)
    assert (back.max_records_per_user, back.method) == (5, "greedy-duplicates")
    assert not list(tmp_path.glob("*.partial"))


def test_batches_travel_with_the_selection(tmp_path: Path) -> None:
    batches = np.array([[0, 2], [1, 2]])
    chosen = Selection.of(
        GRAPH, np.array([1, 1, 2]), 2, method="min-separation", batches=batches, separation=1
    )
    chosen.save(tmp_path / "sel.npz")
    back = Selection.load(tmp_path / "sel.npz")
    assert back.batches is not None
    assert back.batches.tolist() == batches.tolist()
    assert back.separation == 1


def test_a_broken_bound_is_refused() -> None:
    with pytest.raises(InputError, match="a user owns 2 selected records"):
        Selection.of(GRAPH, np.array([1, 1, 0]), 1, method="greedy")


def test_a_selection_for_other_edges_is_refused() -> None:
    chosen = Selection.of(GRAPH, np.array([1, 0, 0]), 1, method="greedy")
    with pytest.raises(InputError, match="other edges"):
        chosen.check(Edges.from_lists([[0, 2], [1], [2]], num_users=3))


def test_an_edited_selection_is_refused() -> None:
    chosen = Selection.of(GRAPH, np.array([1, 0, 0]), 1, method="greedy")
    for edited in (
        dataclasses.replace(chosen, multiplicity=np.array([1, 1, 0])),
        dataclasses.replace(chosen, realised_bound=0),
        dataclasses.replace(chosen, max_records_per_user=0),
    ):
        with pytest.raises(InputError, match="edited"):
            edited.check(GRAPH)


def test_a_selection_without_guarantee_cannot_be_trained_on() -> None:
    chosen = Selection.of(GRAPH, np.array([1, 1, 1]), 1, method="unbounded-random", guarantee=False)
    with pytest.raises(InputError, match="no guarantee"):
        chosen.check(GRAPH)


def test_files_that_are_no_selections_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "bare.npz", multiplicity=np.array([1]))
    with pytest.raises(InputError, match="no array"):
        Selection.load(tmp_path / "bare.npz")
    chosen = Selection.of(GRAPH, np.array([1, 0, 0]), 1, method="greedy")
    dataclasses.replace(chosen, multiplicity=np.array([-1, 0, 0])).save(tmp_path / "neg.npz")
    with pytest.raises(InputError, match="counts"):
        Selection.load(tmp_path / "neg.npz")
    with pytest.raises(InputError, match="cannot be written"):
        chosen.save(tmp_path / "no" / "such" / "folder.npz")
