"""Spark on a cluster of two workers gives what the embedded engine gives, on the largest sets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spark_cluster
from shared import SHARED, needs_shared

pytestmark = [
    pytest.mark.slow,
    needs_shared,
    pytest.mark.skipif(bool(spark_cluster.why_not()), reason=spark_cluster.why_not()),
]

# The largest sets by bytes: one owner a record, and several.
LARGEST = ["books_by_author_chunks.jsonl.gz", "acl_to2022.jsonl.gz", "gitml_2022_2023.jsonl.gz"]
LARGEST_EDGES = ["scholp_threads_math_sx.npz", "gitml_from_to_cc.npz"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[spark_cluster.Cluster]:
    with spark_cluster.started(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def command(cluster: spark_cluster.Cluster | None, *arguments: str | Path) -> dict[str, Any]:
    """What a command of `userdp` prints; with a cluster it runs there, on both workers."""
    before = cluster.applications() if cluster is not None else []
    done = subprocess.run(
        [sys.executable, "-m", "userdp", *map(str, arguments), "--json"],
        env=None if cluster is None else cluster.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    if cluster is not None:
        for old, new in zip(before, cluster.applications(), strict=True):
            assert new - old, "a worker took no part"
    return json.loads(done.stdout)


def stores(
    source: Path, folder: Path, cluster: spark_cluster.Cluster
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the two engines' imports print; the stores are `duckdb` and `spark`."""
    found: list[dict[str, Any]] = []
    for engine, where in (("duckdb", None), ("spark", cluster)):
        options = ("--out", folder / engine, "--key", folder / "key", "--engine", engine)
        found.append(command(where, "import", source, *options))
    first, second = found
    return first, second


@pytest.mark.parametrize("name", LARGEST)
def test_import_and_statistics_are_the_same_on_two_workers(
    name: str, tmp_path: Path, cluster: spark_cluster.Cluster
) -> None:
    local, spread = stores(SHARED / "data" / name, tmp_path, cluster)
    for key in ("records", "users", "edges", "skipped"):
        assert local[key] == spread[key]
    manifests = [
        json.loads((tmp_path / engine / "manifest.json").read_text())
        for engine in ("duckdb", "spark")
    ]
    # Checksums of every file, texts aside; the fingerprint covers those, under a key of its own.
    assert manifests[0]["sha256"] == manifests[1]["sha256"]
    assert manifests[0]["sizes"] == manifests[1]["sizes"]
    assert (tmp_path / "duckdb/records.arrow").read_bytes() == (
        tmp_path / "spark/records.arrow"
    ).read_bytes()
    described = [command(None, "stats", tmp_path / engine) for engine in ("duckdb", "spark")]
    for answer in described:
        del answer["fingerprint"]
    assert described[0] == described[1]


def test_near_duplicates_are_the_same_on_two_workers(
    tmp_path: Path, cluster: spark_cluster.Cluster
) -> None:
    stores(SHARED / "data" / LARGEST[2], tmp_path, cluster)
    found = [
        command(where, "duplicates", tmp_path / "duckdb", "--engine", engine)
        for engine, where in (("duckdb", None), ("spark", cluster))
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("name", LARGEST_EDGES)
def test_bounding_is_the_same_on_two_workers(
    name: str, tmp_path: Path, cluster: spark_cluster.Cluster
) -> None:
    selected = []
    for engine, where in (("local", None), ("duckdb", None), ("spark", cluster)):
        out = tmp_path / f"{engine}.npz"
        options = ("--max-records-per-user", "4", "--engine", engine, "--out", out)
        # A part is decided in rounds on the engine, so that the workers have something to do.
        rounds = () if engine == "local" else ("--finish-below", "20000")
        found = command(where, "bound", SHARED / "data/edges" / name, *options, *rounds)
        assert engine == "local" or found["rounds"] > 1
        selected.append(np.load(out)["multiplicity"])
    assert selected[0].sum() > 0
    assert np.array_equal(selected[0], selected[1])
    assert np.array_equal(selected[0], selected[2])
