"""Speed and memory of contribution bounding, as ratios within one run.

    python benchmarks/bounding.py greedy           8 million records, against one sort and one pass
    python benchmarks/bounding.py rounds           rounds on DuckDB against the sequential pass
    python benchmarks/bounding.py rounds 500000    the same for one number of records
    python benchmarks/bounding.py generators       the graphs of Ganesh et al. 2025, App. C.1
    python benchmarks/bounding.py exact [FOLDER]   proven optima on every .npz of a folder
    python benchmarks/bounding.py separation       Algorithm 4 and its largest separation
    python benchmarks/bounding.py proposals        users' own proposals against one common priority

Times are the best of several runs, so that other work on the machine disturbs them least.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reproductions.ganesh2025 import generators
from userdp.bounding import exact, greedy, min_sep, rounds
from userdp.bounding.edges import Edges, Ints, Owners
from userdp.compiled import compiled
from userdp.data.engine import DuckDB

REPEATS = 7


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most memory numpy holds during a call, beyond what it held before."""
    tracemalloc.start()
    function()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


@compiled
def read_in_order(indptr: Ints, owners: Owners, order: Ints) -> int:
    """The bar's one pass: reads each incidence once, record by record in sorted order."""
    total = 0
    for record in order:
        for at in range(indptr[record], indptr[record + 1]):
            total += owners[at]
    return total


def bench_greedy(num_records: int = 8_000_000) -> None:
    """Bar: at most 3 times one stable sort by cardinality plus one pass; memory 3 edge lists."""
    rng = np.random.default_rng(0)
    for model in (generators.regular_graph, generators.skewed_graph):
        print(model.__name__)
        compare_greedy(model(num_records=num_records, mean_records=4.0, rng=rng))


def compare_greedy(graph: Edges) -> None:
    """Greedy beside the yardstick, which does not depend on any code of ours.

    The yardstick is numpy's stable argsort of the cardinalities and one compiled pass that reads
    every incidence in that order. The same with our counting sort, which knows that cardinalities
    are small, is printed beside it: a harder yardstick, made of a part of greedy itself.
    """
    cardinality = graph.cardinality()
    order = np.argsort(cardinality, kind="stable")
    functions: dict[str, Callable[[], Any]] = {
        "np.argsort(kind='stable')": lambda: np.argsort(cardinality, kind="stable"),
        "our counting sort": lambda: greedy.by_cardinality(graph),
        "one pass": partial(read_in_order, graph.indptr, graph.owners, order),
    }
    methods = {
        f"{method.__name__} k={bound}": partial(method, graph, bound)
        for bound in (1, 3)
        for method in (greedy.greedy, greedy.greedy_duplicates)
    }
    for function in (functions | methods).values():
        function()
    found = {name: clock for name, (clock, _) in least(functions | methods, REPEATS).items()}
    print(
        f"  {graph.num_records:,} records, {graph.num_incidences:,} incidences, "
        f"{graph.num_users:,} users, edge list {graph.nbytes / 2**20:.0f} MiB"
    )
    for name in functions:
        print(f"  {name:26s} {found[name] * 1e3:8.1f} ms")
    yardstick_seconds = found["np.argsort(kind='stable')"] + found["one pass"]
    harder_seconds = found["our counting sort"] + found["one pass"]
    for name, select in methods.items():
        memory = (graph.nbytes + peak_bytes(select)) / graph.nbytes
        print(
            f"  {name:26s} {found[name] * 1e3:8.1f} ms, "
            f"{found[name] / yardstick_seconds:.2f} times the yardstick "
            f"({found[name] / harder_seconds:.2f} times one of our counting sort); "
            f"{memory:.2f} edge lists of memory, the input included"
        )


def least(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, tuple[float, float]]:
    """The best time of each function, and its least processor time on all cores together.

    They take turns, so that other work on the machine hits all alike; processor time hardly minds.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            processor, clock = time.process_time(), time.perf_counter()
            function()
            times[name].append((time.perf_counter() - clock, time.process_time() - processor))
    return {
        name: (min(t[0] for t in found), min(t[1] for t in found)) for name, found in times.items()
    }


def yardstick(graph: Edges) -> None:
    """What a plain round on DuckDB does: count by user and join back, by record and join back."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(DuckDB(Path(folder), memory_limit="4GB")) as engine,
    ):
        engine.count_in_arrays()
        columns = {"record": graph.record_of_incidence().astype(np.int32), "user": graph.owners}
        engine.load("owners", pa.table(columns))
        for key in ("user", "record"):
            engine.run(f"CREATE TABLE n AS SELECT {key}, count(*) AS n FROM owners GROUP BY {key}")
            engine.run(f"CREATE TABLE by_{key} AS SELECT * FROM owners JOIN n USING ({key})")
            engine.drop("n")


ROUNDS_SIZES = (500_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000)


def bench_rounds(sizes: tuple[int, ...] = ROUNDS_SIZES) -> None:
    """Bar: within 20 times of sequential at 500,000 records, and linear from there."""
    warm = generators.regular_graph(
        num_records=1000, mean_records=4.0, rng=np.random.default_rng(0)
    )
    rounds.greedy_rounds(warm, 3, finish_below=0)
    for num_records in sizes:
        graph = generators.regular_graph(
            num_records=num_records, mean_records=4.0, rng=np.random.default_rng(0)
        )
        expected = greedy.greedy(graph, 3)
        tails = {
            "rounds, all on the engine": 0,
            "rounds, rest in memory": rounds.FINISH_BELOW,
        }
        found: dict[str, rounds.Rounds] = {}

        def run(name: str, finish_below: int, graph: Edges = graph, found: Any = found) -> None:
            found[name] = rounds.greedy_rounds(graph, 3, finish_below=finish_below)

        sequential, plain = "sequential", "DuckDB's yardstick"
        seconds = least(
            {
                sequential: partial(greedy.greedy, graph, 3),
                plain: partial(yardstick, graph),
                **{name: partial(run, name, below) for name, below in tails.items()},
            },
            repeats=max(4, 10_000_000 // num_records),
        )
        base, base_processor = seconds[sequential]
        print(f"{num_records:,} records, {graph.num_incidences:,} incidences")
        for name, (clock, processor) in seconds.items():
            print(
                f"  {name:26s} {clock * 1e3:7.1f} ms, {clock / base:5.1f} times sequential; "
                f"processor time {processor * 1e3:7.1f} ms, {processor / base_processor:5.1f} "
                f"times, {processor / num_records * 1e6:.3f} us a record"
            )
        for name, result in found.items():
            assert (result.multiplicity == expected).all()
            print(
                f"  {name:26s} {result.rounds} rounds, {result.shuffles} shuffles, "
                f"{result.held_bytes / 2**20:.0f} MiB held, undecided {list(result.undecided)}",
                flush=True,
            )


def bench_generators() -> None:
    for model in (generators.regular_graph, generators.skewed_graph):
        model(num_records=10, mean_records=2.0, rng=np.random.default_rng(0))
        for num_records in (125_000, 1_000_000, 8_000_000):
            start = time.perf_counter()
            graph = model(num_records=num_records, mean_records=4.0, rng=np.random.default_rng(0))
            print(
                f"{model.__name__} {num_records:,}: {time.perf_counter() - start:.2f} s, "
                f"largest degree {graph.degrees().max():,}"
            )


def bench_exact(folder: Path) -> None:
    """Bar: proven optima for k in {1, 2, 3, 5, 10} in a few seconds each."""
    for path in sorted(folder.glob("*.npz")):
        graph = Edges.load(path)
        for bound in (1, 2, 3, 5, 10):
            start = time.perf_counter()
            best = exact.exact(graph, bound)
            middle = time.perf_counter()
            copies = exact.exact_duplicates(graph, bound)
            end = time.perf_counter()
            taken = greedy.greedy(graph, bound).sum()
            print(
                f"{path.stem} k={bound}: {best.value:,} proven={best.optimal} in "
                f"{middle - start:.2f} s, {best.residual:,} variables; greedy "
                f"{taken / best.value:.1%}; with duplicates {copies.value:,} "
                f"proven={copies.optimal} in {end - middle:.2f} s"
            )


def bench_separation() -> None:
    for num_records, steps, batch_size in ((125_000, 100, 1024), (1_000_000, 1000, 4096)):
        for model in (generators.regular_graph, generators.skewed_graph):
            graph = model(num_records=num_records, mean_records=4.0, rng=np.random.default_rng(0))
            min_sep.largest_separation(graph, steps=1, batch_size=1)
            start = time.perf_counter()
            largest = min_sep.largest_separation(graph, steps=steps, batch_size=batch_size)
            seconds = time.perf_counter() - start
            print(
                f"{model.__name__} {num_records:,} records, {steps} batches of {batch_size}: "
                f"largest separation {largest}, searched in {seconds:.2f} s"
            )


def bench_proposals(folder: Path) -> None:
    """Sizes when every user proposes in an order of its own, as in arXiv 2507.23432.

    In each round a user proposes as many undecided records as it has free places, the first of its
    own order; a record that all owners propose is taken, one with a full owner is refused.
    """
    rng = np.random.default_rng(0)
    for path in sorted(folder.glob("*.npz")):
        graph = Edges.load(path)
        for bound in (1, 3, 10):
            record, user = graph.record_of_incidence(), graph.owners.astype(np.int64)
            free = np.full(graph.num_users, bound)
            taken = np.zeros(graph.num_records, dtype=np.bool_)
            sizes: list[int] = []
            while len(record) and len(sizes) < 100:
                # Fewest owners first, ties by a coin of the user's own: proposals need not agree.
                order = np.lexsort((rng.random(len(record)), graph.cardinality()[record], user))
                record, user = record[order], user[order]
                first = np.flatnonzero(np.r_[True, user[1:] != user[:-1]])
                position = np.arange(len(user)) - np.repeat(first, np.diff(np.r_[first, len(user)]))
                refused = np.zeros(graph.num_records, dtype=np.bool_)
                refused[record[position >= free[user]]] = True
                agreed = ~refused[record]
                taken[record[agreed]] = True
                free -= np.bincount(user[agreed], minlength=graph.num_users)
                record, user = record[~agreed], user[~agreed]
                full = np.zeros(graph.num_records, dtype=np.bool_)
                full[record[free[user] == 0]] = True
                record, user = record[~full[record]], user[~full[record]]
                sizes.append(int(taken.sum()))
            assert graph.contributions(taken.astype(np.int64)).max() <= bound
            size = int(greedy.greedy(graph, bound).sum())
            print(
                f"{path.stem} k={bound}: common priority {size:,}; own orders {sizes[-1]:,} "
                f"({sizes[-1] / size:.1%}) after {len(sizes)} rounds, {sizes[0] / size:.1%} "
                "after one"
            )


def main() -> None:
    """Run the benchmark that is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shared = Path(os.environ.get("USERDP_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    folder = shared / "data" / "edges"
    benchmarks: dict[str, Callable[[str | None], None]] = {
        "greedy": lambda _: bench_greedy(),
        "rounds": lambda given: bench_rounds((int(given),)) if given else bench_rounds(),
        "generators": lambda _: bench_generators(),
        "exact": lambda given: bench_exact(Path(given or folder)),
        "separation": lambda _: bench_separation(),
        "proposals": lambda given: bench_proposals(Path(given or folder)),
    }
    parser.add_argument("what", nargs="?", choices=benchmarks, default="greedy")
    parser.add_argument("given", nargs="?", help="rounds: records; exact, proposals: a folder")
    options = parser.parse_args()
    benchmarks[options.what](options.given)


if __name__ == "__main__":
    main()
