from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from userdp.bounding.edges import Edges
from userdp.bounding.selection import Selection
from userdp.data.record import Record
from userdp.data.store import write_store
from userdp.errors import InputError


def test_an_owner_named_twice_counts_once() -> None:
    graph = Edges.of([0, 3, 4], [1, 0, 1, 0], num_users=2)
    assert graph.cardinality().tolist() == [2, 1]
    assert graph.owners.tolist() == [1, 0, 0]


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8, np.uint64])
def test_any_integer_type_gives_the_same_graph(kind: type) -> None:
    graph = Edges.of(np.array([0, 2, 3], dtype=kind), np.array([0, 2, 1], dtype=kind), num_users=3)
    same = Edges.from_lists([[0, 2], [1]], num_users=3)
    assert graph.digest() == same.digest()


def test_the_digest_tells_graphs_apart() -> None:
    digests = {
        Edges.from_lists(records, num_users=users).digest()
        for records, users in (
            ([[0], [1]], 2),
            ([[0], [1]], 3),
            ([[1], [0]], 2),
            ([[0, 1]], 2),
            ([[0], [1], [1]], 2),
        )
    }
    assert len(digests) == 5


@pytest.mark.parametrize(
    ("indptr", "indices", "users", "says"),
    [
        ([0, 1, 1], [0], 1, "record 1 has no owner"),
        ([0, 1, 2], [0, -1], 2, "record 1 has a negative owner number"),
        ([0, 1, 2], [0, 2], 2, "record 1 has an owner number past n_users - 1 = 1"),
        ([0, 2, 1], [0], 2, "never decrease"),
        ([0, 1], [0, 1], 2, "end at 2"),
        ([1, 2], [0, 1], 2, "start at 0"),
        ([], [], 2, "start at 0"),
        ([0, 1], [0.5], 2, "integers"),
        ([[0, 1]], [0], 2, "flat"),
        ([0, 1], [0], 0, "at least one user"),
    ],
)
def test_bad_graphs_are_refused(indptr, indices, users: int, says: str) -> None:
    with pytest.raises(InputError, match=says):
        Edges.of(indptr, indices, num_users=users)


def test_a_graph_without_records_is_a_graph() -> None:
    graph = Edges.from_lists([], num_users=3)
    assert (graph.num_records, graph.num_incidences) == (0, 0)


def test_a_graph_never_prints_its_owners() -> None:
    graph = Edges.from_lists([[123456]], num_users=200_000)
    selection = Selection.of(graph, np.array([1]), 1, method="greedy")
    assert "123456" not in repr(graph) + repr(selection)


def test_a_store_is_read_by_its_owner_lists(tmp_path: Path) -> None:
    path = tmp_path / "store"
    records = [Record("one", ("ann", "bob"), "line 1"), Record("two", ("bob",), "line 2")]
    write_store(records, path, key=bytes(32))
    assert Edges.load(path).digest() == Edges.from_lists([[0, 1], [1]], num_users=2).digest()

    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"records": 3}))
    with pytest.raises(InputError, match="counts 3 records"):
        Edges.load(path)
    (path / "record_users.npy").unlink()
    with pytest.raises(InputError, match="missing or changed"):
        Edges.load(path)
    (path / "manifest.json").unlink()
    with pytest.raises(InputError, match="not a user store"):
        Edges.load(path)


def test_files_that_are_no_edge_lists_are_refused(tmp_path: Path) -> None:
    whole = tmp_path / "edges.npz"
    np.savez(whole, indptr=np.array([0, 1]), indices=np.array([0]), n_users=1)
    assert Edges.load(whole).num_records == 1

    with pytest.raises(InputError, match="no such file"):
        Edges.load(tmp_path / "nowhere.npz")
    half = tmp_path / "half.npz"
    half.write_bytes(whole.read_bytes()[:200])
    with pytest.raises(InputError, match="not a readable"):
        Edges.load(half)
    bare = tmp_path / "bare.npz"
    np.savez(bare, indptr=np.array([0, 1]))
    with pytest.raises(InputError, match="no array indices, n_users"):
        Edges.load(bare)
    array = tmp_path / "array.npz"
    with array.open("wb") as file:
        np.save(file, np.array([0, 1]))
    with pytest.raises(InputError, match="single array"):
        Edges.load(array)
    pickled = tmp_path / "pickled.npz"
    np.savez(pickled, indptr=np.array([0, {}], dtype=object), indices=[0], n_users=1)
    with pytest.raises(InputError, match="plain arrays"):
        Edges.load(pickled)
    several = tmp_path / "several.npz"
    np.savez(several, indptr=np.array([0, 1]), indices=np.array([0]), n_users=np.array([1, 2]))
    with pytest.raises(InputError, match="one integer"):
        Edges.load(several)
    with zipfile.ZipFile(tmp_path / "empty.npz", "w"):
        pass
    with pytest.raises(InputError, match="no array"):
        Edges.load(tmp_path / "empty.npz")
