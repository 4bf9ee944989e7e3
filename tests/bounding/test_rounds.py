from __future__ import annotations

import importlib.util

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bounding import graphs
from reproductions.ganesh2025 import generators
from shared import SHARED, needs_shared
from userdp.bounding import greedy, round_queries, rounds
from userdp.bounding.edges import Edges
from userdp.data.engine import DuckDB, EngineName, engine_of
from userdp.errors import InputError

HAS_SPARK = importlib.util.find_spec("pyspark") is not None
needs_spark = pytest.mark.skipif(not HAS_SPARK, reason="PySpark is not installed: userdp[spark]")


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(graphs.edges(max_users=8, max_records=40), st.integers(1, 4))
def test_rounds_equal_the_sequential_selection(graph: Edges, bound: int) -> None:
    found = rounds.greedy_rounds(graph, bound, finish_below=0)
    assert found.multiplicity.tolist() == greedy.greedy(graph, bound).tolist()
    assert found.finished == 0


@settings(max_examples=25, deadline=None)
@given(graphs.edges(max_users=8, max_records=40), st.integers(1, 4), st.integers(1, 60))
def test_the_residual_finished_in_memory_equals_the_sequential_selection(
    graph: Edges, bound: int, finish_below: int
) -> None:
    found = rounds.greedy_rounds(graph, bound, finish_below=finish_below)
    assert found.multiplicity.tolist() == greedy.greedy(graph, bound).tolist()
    assert found.finished <= finish_below


@pytest.mark.parametrize("model", [generators.regular_graph, generators.skewed_graph])
def test_the_tail_may_be_finished_in_memory_at_any_point(model) -> None:
    graph = model(num_records=5000, mean_records=8.0, rng=np.random.default_rng(0))
    expected = greedy.greedy(graph, 3).tolist()
    used = set()
    for finish_below in (0, 20, 500, 3000, 10**9):
        found = rounds.greedy_rounds(graph, 3, finish_below=finish_below)
        assert found.multiplicity.tolist() == expected
        assert found.finished == found.undecided[-1] <= finish_below
        assert found.held_bytes > 0
        used.add(found.shuffles)
        taking = rounds.SHUFFLES_TO_TAKE * found.rounds + rounds.SHUFFLES_OF_SKETCH
        refusing = rounds.SHUFFLES_TO_REFUSE * found.rounds + rounds.SHUFFLES_OF_SKETCH
        # The last round may have left refusing to memory.
        saved = rounds.SHUFFLES_TO_REFUSE + rounds.SHUFFLES_OF_SKETCH * (found.rounds == 1)
        assert taking + refusing - found.shuffles in (0, saved)
    # The first round is the engine's, but what it leaves may be refused in memory.
    assert found.rounds == 1
    assert found.shuffles == rounds.SHUFFLES_TO_TAKE + rounds.SHUFFLES_OF_SKETCH
    assert len(used) > 3


def test_priorities_with_gaps_are_finished_as_well(tmp_path) -> None:
    rows = {"priority": [1 << 50, 1 << 50, 7, 9], "user": [1 << 40, 3, 3, 1 << 40]}
    table = pa.table({name: pa.array(values, pa.int64()) for name, values in rows.items()})
    with engine_of(EngineName.DUCKDB, tmp_path) as engine:
        owners = engine.load("owners", table)
        for finish_below in (0, 100):
            done = rounds.refuse_in_rounds(engine, owners, 1, finish_below=finish_below)
            assert done.refused.tolist() == [1 << 50]


@pytest.mark.parametrize("join_range", [pytest.param(1, marks=pytest.mark.slow), 7, 399, 400, None])
def test_joining_range_by_range_changes_nothing(
    join_range: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DuckDB, "join_range", join_range)
    graph = generators.skewed_graph(num_records=400, mean_records=8.0, rng=np.random.default_rng(4))
    for finish_below in (0, 10**9):
        found = rounds.greedy_rounds(graph, 2, finish_below=finish_below)
        assert found.multiplicity.tolist() == greedy.greedy(graph, 2).tolist()


def test_a_negative_tail_is_refused() -> None:
    graph = Edges.from_lists([[0]], num_users=1)
    with pytest.raises(InputError, match="finish_below=-1"):
        rounds.greedy_rounds(graph, 1, finish_below=-1)


def test_a_long_chain_of_conflicts_takes_many_rounds_and_is_still_right() -> None:
    chain = Edges.from_lists([[i, i + 1] for i in range(30)], num_users=31)
    found = rounds.greedy_rounds(chain, 1, finish_below=0)
    assert found.multiplicity.tolist() == [1, 0] * 15
    assert found.rounds == 15


def test_a_table_of_plain_pairs_gets_the_greedy_priorities(tmp_path) -> None:
    graph = generators.regular_graph(
        num_records=300, mean_records=5.0, rng=np.random.default_rng(1)
    )
    with engine_of(EngineName.DUCKDB, tmp_path) as engine:
        engine.run("CREATE TABLE pairs (record BIGINT, user INTEGER)")
        pairs = zip(graph.record_of_incidence().tolist(), graph.owners.tolist(), strict=True)
        engine.run(f"INSERT INTO pairs VALUES {', '.join(map(str, pairs))}")
        import ibis

        table = ibis.table({"record": "int64", "user": "int32"}, name="pairs")
        done = rounds.refuse_in_rounds(
            engine, round_queries.with_priority(table), 2, finish_below=0
        )
    expected = np.flatnonzero(greedy.greedy(graph, 2) == 0)
    assert sorted(round_queries.records_of(done.refused).tolist()) == expected.tolist()


def test_a_small_memory_limit_changes_nothing() -> None:
    graph = generators.regular_graph(
        num_records=100_000, mean_records=4.0, rng=np.random.default_rng(2)
    )
    found = rounds.greedy_rounds(graph, 2, finish_below=0, memory_limit="60MB")
    assert (found.multiplicity == greedy.greedy(graph, 2)).all()


def test_an_impossible_memory_limit_is_refused() -> None:
    graph = Edges.from_lists([[0]], num_users=1)
    with pytest.raises(InputError, match="memory_limit"):
        rounds.greedy_rounds(graph, 1, memory_limit="much")


@pytest.mark.skipif(HAS_SPARK, reason="PySpark is installed")
def test_spark_without_pyspark_says_what_to_install() -> None:
    graph = Edges.from_lists([[0]], num_users=1)
    with pytest.raises(InputError, match=r"userdp\[spark\]"):
        rounds.greedy_rounds(graph, 1, engine=EngineName.SPARK)


@needs_spark
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_spark_equals_local_on_a_random_graph() -> None:
    graph = generators.skewed_graph(
        num_records=2000, mean_records=8.0, rng=np.random.default_rng(3)
    )
    found = rounds.greedy_rounds(graph, 3, engine=EngineName.SPARK, finish_below=20)
    assert found.rounds > 1
    assert found.multiplicity.tolist() == greedy.greedy(graph, 3).tolist()


@needs_shared
@pytest.mark.parametrize(
    "engine",
    [
        EngineName.DUCKDB,
        pytest.param(
            EngineName.SPARK,
            marks=[needs_spark, pytest.mark.slow, pytest.mark.filterwarnings("default")],
        ),
    ],
)
def test_engines_equal_local_on_acl_all_papers(engine: EngineName) -> None:
    graph = Edges.load(SHARED / "data" / "edges" / "acl_all_papers.npz")
    for bound in (1, 3, 10):
        found = rounds.greedy_rounds(graph, bound, engine=engine, finish_below=10_000)
        assert found.rounds > 1
        assert (found.multiplicity == greedy.greedy(graph, bound)).all()
