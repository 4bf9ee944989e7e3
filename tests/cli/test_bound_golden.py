"""Real graphs of owners: sizes, hashes and optima computed by independent code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from shared import SHARED, needs_shared
from userdp.bounding.edges import Edges
from userdp.bounding.selection import Selection
from userdp.cli import app

GRAPHS = (
    "acl_abstracts",
    "acl_all_papers",
    pytest.param("gitml_from_to_cc", marks=pytest.mark.slow),
    "qemu_commits",
    "scholp_congress_bills",
    "scholp_email_enron",
    "scholp_email_eu",
    pytest.param("scholp_threads_math_sx", marks=pytest.mark.slow),
)


def bound(name: str, k: int, method: str, out: Path) -> dict[str, Any]:
    source = SHARED / "data" / "edges" / f"{name}.npz"
    command = ["bound", str(source), "--max-records-per-user", str(k), "--method", method]
    result = CliRunner().invoke(app, [*command, "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.slow
@needs_shared
@pytest.mark.parametrize("name", GRAPHS)
def test_greedy_gives_the_golden_selections(name: str, tmp_path: Path) -> None:
    golden = json.loads((SHARED / "golden" / "bounding" / f"greedy_{name}.json").read_text())
    for row in golden["results"]:
        method = {2: "greedy", 3: "greedy-duplicates"}[row["algorithm"]]
        found = bound(name, row["k"], method, tmp_path / "sel.npz")
        selection = Selection.load(tmp_path / "sel.npz")
        assert selection.size == found["size"] == row["size"]
        assert selection.distinct == found["distinct"] == row["distinct"]
        assert selection.sha256() == found["sha256"] == row["sha256_multiplicity_int64le"]
        assert found["examples"] == golden["examples"]
        assert found["users"] == golden["users"]
        for key in ("users_with_any", "users_at_bound", "max_multiplicity"):
            assert found[key] == row[key]
        assert round(found["mean_users_per_record"], 4) == row["mean_users_per_selected"]
        assert found["realised_bound"] <= row["k"]


@needs_shared
def test_with_one_owner_a_record_greedy_is_optimal_and_counted_by_hand(tmp_path: Path) -> None:
    degrees = Edges.load(SHARED / "data" / "edges" / "gitml_from_only.npz").degrees()
    for k in (1, 3, 10):
        expected = int(np.minimum(degrees, k).sum())
        for method in ("greedy", "exact", "random"):
            found = bound("gitml_from_only", k, method, tmp_path / "sel.npz")
            assert found["size"] == found["upper_bound"] == expected
            assert found["optimal"] is True


@pytest.mark.slow
@needs_shared
@pytest.mark.parametrize("name", GRAPHS)
def test_exact_gives_the_golden_optima(name: str, tmp_path: Path) -> None:
    golden = json.loads((SHARED / "golden" / "bounding" / f"ilp2_{name}.json").read_text())
    for row in golden:
        found = bound(name, row["k"], "exact", tmp_path / "sel.npz")
        assert found["size"] == found["upper_bound"] == row["size"]
        assert found["optimal"] is True
        assert found["realised_bound"] <= row["k"]
