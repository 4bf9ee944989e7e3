"""The command `userdp bound`, on small graphs and on wrong input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reproductions.ganesh2025 import generators
from userdp import cli
from userdp.bounding import min_sep
from userdp.bounding.edges import Edges
from userdp.bounding.selection import Selection

METHODS = [
    ["greedy"],
    ["greedy", "--weight", "owners"],
    ["greedy", "--engine", "duckdb"],
    ["greedy-duplicates"],
    ["exact"],
    ["exact", "--weight", "owners"],
    ["exact-duplicates"],
    ["balanced", "--few-owners", "2", "--many-run", "3"],
    ["random"],
]


@pytest.fixture
def graph() -> Edges:
    return generators.regular_graph(num_records=400, mean_records=6.0, rng=np.random.default_rng(0))


@pytest.fixture
def source(graph: Edges, tmp_path: Path) -> Path:
    path = tmp_path / "edges.npz"
    np.savez(path, indptr=graph.indptr, indices=graph.owners, n_users=graph.num_users)
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run the program as a shell would; its exit code."""
    monkeypatch.setattr(sys, "argv", ["userdp", "bound", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    return int(exit_info.value.code or 0)


@pytest.mark.parametrize("method", METHODS, ids=" ".join)
def test_every_method_writes_a_selection_that_keeps_the_bound(
    method: list[str],
    graph: Edges,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "sel.npz"
    k = ["--max-records-per-user", 3]
    assert run(monkeypatch, source, *k, "--method", *method, "--out", out, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    selection = Selection.load(out)
    selection.check(graph)
    contributed = graph.contributions(selection.multiplicity)
    assert contributed.max() == found["realised_bound"] <= 3
    assert found["users_at_bound"] == (contributed == 3).sum()
    assert found["size"] == selection.size
    assert found["distinct"] == selection.distinct
    assert found["mean_users_per_record"] == contributed.sum() / selection.size
    assert found["sha256"] == selection.sha256()
    assert found["guarantee"] is True
    if found["upper_bound"] is not None:
        assert found.get("value", found["size"]) <= found["upper_bound"]
    assert {"examples", "users", "optimal", "seconds"} <= found.keys()


def test_a_person_reads_sentences(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, source, "--max-records-per-user", 2, "--method", "exact") == 0
    printed = capsys.readouterr().out
    assert "no user owns more than 2" in printed
    assert "proven" in printed


def test_min_separation_finds_the_largest_separation_by_itself(
    graph: Edges,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "sel.npz"
    shape = ["--steps", 12, "--batch-size", 10]
    command = [source, "--method", "min-separation", *shape, "--out", out, "--json"]
    assert run(monkeypatch, *command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["separation"] == min_sep.largest_separation(graph, steps=12, batch_size=10)
    selection = Selection.load(out)
    selection.check(graph)
    assert selection.batches is not None
    assert selection.batches.shape == (12, 10)
    assert found["size"] == 120

    assert run(monkeypatch, *command, "--separation", 1, "--max-records-per-user", 1) == 2
    assert "more than --max-records-per-user 1" in capsys.readouterr().err
    assert run(monkeypatch, *command, "--separation", 13) == 2
    assert f"{found['separation']} is the largest found" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["", "-low", "-high"])
def test_baselines_without_guarantee_say_so(
    kind: str,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = [source, "--max-records-per-user", 1, "--method", f"unbounded-random{kind}"]
    assert run(monkeypatch, *command, "--seed", 0) == 0
    assert "NO GUARANTEE" in capsys.readouterr().out
    assert run(monkeypatch, *command, "--seed", 0, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["guarantee"] is False
    assert found["realised_bound"] > 1


def test_an_earlier_selection_is_replaced_and_that_is_said(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "sel.npz"
    for bound in (1, 2):
        assert run(monkeypatch, source, "--max-records-per-user", bound, "--out", out) == 0
        assert ("earlier selection, which is replaced" in capsys.readouterr().err) == (bound == 2)
    assert Selection.load(out).realised_bound == 2


def test_a_seed_fixes_the_random_order(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [source, "--max-records-per-user", 2, "--method", "random", "--json"]
    hashes: list[str] = []
    for seed in (1, 1, 2):
        assert run(monkeypatch, *command, "--seed", seed) == 0
        hashes.append(json.loads(capsys.readouterr().out)["sha256"])
    assert hashes[0] == hashes[1] != hashes[2]


def test_the_grid_gives_a_front_from_large_to_many_owners(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [source, "--max-records-per-user", 2, "--method", "balanced", "--grid", "--json"]
    assert run(monkeypatch, *command) == 0
    front = json.loads(capsys.readouterr().out)["front"]
    sizes = [point["size"] for point in front]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--max-records-per-user"),
        (["--max-records-per-user", "0"], "Use 1 or more"),
        (["--max-records-per-user", "-3"], "Use 1 or more"),
        (["--method", "min-separation"], "--steps"),
        (["--max-records-per-user", "1", "--method", "exact", "--engine", "duckdb"], "use local"),
        (["--max-records-per-user", "1", "--method", "random", "--weight", "owners"], "--weight"),
        (["--max-records-per-user", "1", "--method", "longest"], "holds owners only"),
        (["--max-records-per-user", "1", "--method", "lowest-perplexity"], "which need it"),
        (["--max-records-per-user", "1", "--model", "gpt2"], "The method is greedy"),
        (["--max-records-per-user", "1", "--method", "exact", "--time-limit", "0"], "time_limit"),
        (["--max-records-per-user", "1", "--method", "balanced", "--few-run", "0"], "few_run"),
    ],
)
def test_wrong_options_end_with_code_2_and_one_line(
    arguments: list[str],
    says: str,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, source, *arguments) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.parametrize(
    ("indptr", "indices", "users", "says"),
    [
        ([0, 0, 1], [0], 1, "no owner"),
        ([0, 1], [-1], 1, "negative owner number"),
        ([0, 1], [7], 7, "past n_users"),
    ],
)
def test_wrong_graphs_end_with_code_2_and_one_line(
    indptr: list[int],
    indices: list[int],
    users: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, indptr=np.array(indptr), indices=np.array(indices), n_users=users)
    out = tmp_path / "sel.npz"
    assert run(monkeypatch, path, "--max-records-per-user", 1, "--out", out) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert printed.err.count("\n") == 1
    assert not out.exists()
