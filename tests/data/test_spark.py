from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from importing import KEY, bring_in

from shared import SHARED, needs_shared
from userdp.data import duplicates
from userdp.data.engine import EngineName
from userdp.data.identity import DropRule, IdRule, Pseudonyms
from userdp.data.record import Record, batches_of
from userdp.data.store import UserStore, write_batches

pytest.importorskip("pyspark", reason="the extra [spark] is not installed")
pytestmark = [
    pytest.mark.slow,
    # PySpark leaves sockets to the garbage collector and calls what pandas deprecates.
    pytest.mark.filterwarnings("ignore"),
]


@needs_shared
def test_both_engines_give_the_same_fingerprint(tmp_path: Path) -> None:
    source = SHARED / "data/acl_to2022.jsonl.gz"
    local = bring_in(source, tmp_path / "duckdb")
    cluster = bring_in(source, tmp_path / "spark", engine=EngineName.SPARK)
    assert local == cluster
    same_files(tmp_path / "duckdb", tmp_path / "spark")


@pytest.mark.parametrize("first_only", [False, True])
def test_both_engines_agree_on_merging_dropping_and_first_owners(
    tmp_path: Path, first_only: bool
) -> None:
    rng = np.random.default_rng(2)
    names = ["ann", "Ann", "bob", "cy", "list", "LIST", "dot"]
    items = [
        Record(f"text {i}", tuple(rng.choice(names, size=rng.integers(1, 5))), "here")
        for i in range(500)
    ]
    for engine in EngineName:
        write_batches(
            batches_of(items),
            tmp_path / engine.value,
            pseudonyms=Pseudonyms.under(KEY),
            id_rule=IdRule.MERGE,
            first_owner_only=first_only,
            drop=DropRule(ids=frozenset({"list"})),
            engine=engine,
        )
    same_files(tmp_path / "duckdb", tmp_path / "spark")
    store = UserStore.open(tmp_path / "spark")
    clusters = [
        duplicates.across_users(store, tmp_path / f"scratch {engine}", threshold=0.2, engine=engine)
        for engine in EngineName
    ]
    assert np.array_equal(clusters[0].cluster, clusters[1].cluster)


def same_files(left: Path, right: Path) -> None:
    first, second = UserStore.open(left).manifest, UserStore.open(right).manifest
    assert first["sha256"] == second["sha256"]
    assert first["fingerprint"] == second["fingerprint"]
