"""Speed and memory of the data part, as ratios in one run.

    python benchmarks/data.py [--records 10000000] [--users 100000]

Import: the same JSON Lines file read by DuckDB alone and written sorted by user to Parquet.
Random access: cohorts of 1,024 users with up to 16 records each as padded token arrays, against
filtering a pandas frame. Waiting: the share of a training loop that waits for its next cohort.
Everything is written under a temporary folder and removed.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

COHORT, GROUP = 1024, 16

BASELINE = """
import duckdb, sys
connection = duckdb.connect()
connection.execute(f"SET temp_directory = '{sys.argv[2]}.tmp'")
connection.execute(
    f"COPY (SELECT * FROM read_json('{sys.argv[1]}', format = 'newline_delimited') ORDER BY user) "
    f"TO '{sys.argv[2]}' (FORMAT parquet)"
)
"""
OURS = """
import sys
from pathlib import Path
from userdp.data.identity import Pseudonyms
from userdp.data.sources import Reading, read
from userdp.data.store import write_batches
source, out = sys.argv[1:3]
batches = read([source], Reading(), Path(out + ".tmp"))
write_batches(batches, Path(out), pseudonyms=Pseudonyms.under(bytes(32)))
"""


def write_source(path: Path, records: int, users: int) -> None:
    """Short made-up sentences; user number u has a share that falls like u^(-2/3)."""
    import duckdb

    duckdb.sql(
        f"""COPY (
          SELECT 'user' || lpad(floor(power((hash(i) % 1000003) / 1000003.0, 3) * {users})
                   ::INT::VARCHAR, 6, '0') AS user,
                 'word' || (hash(i * 7) % 10007) || ' and other ' || (hash(i * 13) % 100003)
                   || ' things were said at ' || i || ' by someone' AS text
          FROM range({records}) t(i)) TO '{path}' (FORMAT json)"""
    )


def measured(script: str, *arguments: str) -> tuple[float, float]:
    """Seconds and peak gigabytes of a script in a process of its own."""
    probe = (
        "import resource, time; began = time.perf_counter()\n"
        + script
        + "\nprint(time.perf_counter() - began, "
        "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe, *arguments], capture_output=True, text=True, check=True
    )
    seconds, gigabytes = done.stdout.split()[-2:]
    return float(seconds), float(gigabytes)


def timed(call: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a call."""
    times: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def import_ratio(folder: Path, source: Path, repeats: int) -> dict[str, Any]:
    """Both alternate, so that a busy machine slows both."""
    base: list[tuple[float, float]] = []
    ours: list[tuple[float, float]] = []
    for i in range(repeats):
        base.append(measured(BASELINE, str(source), str(folder / f"base{i}.parquet")))
        ours.append(measured(OURS, str(source), str(folder / f"store{i}")))
    ratios = [mine[0] / theirs[0] for mine, theirs in zip(ours, base, strict=True)]
    return {
        "source_gigabytes": round(source.stat().st_size / 1e9, 2),
        "duckdb_seconds": [round(seconds, 2) for seconds, _ in base],
        "import_seconds": [round(seconds, 2) for seconds, _ in ours],
        "ratio": round(statistics.median(ratios), 2),
        "import_peak_gigabytes": round(max(peak for _, peak in ours), 2),
        "duckdb_peak_gigabytes": round(max(peak for _, peak in base), 2),
    }


def store_access(path: Path) -> dict[str, Any]:
    from userdp.data.store import UserStore

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    opening = timed(lambda: UserStore.open(path), 5)
    store = UserStore.open(path)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    rng = np.random.default_rng(0)
    users = iter(rng.integers(0, store.num_users, 10_000).tolist())
    one_user = timed(lambda: store.texts_of(store.records_of(next(users))[:GROUP]), 200)

    def cohort() -> None:
        chosen = rng.choice(store.num_users, 4096, replace=False)
        store.texts_of(store.records_of_users(chosen, at_most=GROUP)[1])

    return {
        "open_milliseconds": round(opening * 1e3, 1),
        "open_megabytes": round(grown / 1e3, 1),
        "one_user_milliseconds": round(one_user * 1e3, 3),
        "cohort_of_4096_milliseconds": round(timed(cohort, 5) * 1e3, 1),
    }


class Words:
    """A tokenizer of whole words, cheap enough for millions of records."""

    eos_token_id = 0

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[len(word) for word in text.split()] for text in texts]}

    def get_vocab(self) -> dict[str, int]:
        return {"word": 4}


def random_access(path: Path) -> dict[str, Any]:
    import pandas as pd

    from userdp.data.prefetch import Prefetched
    from userdp.data.store import UserStore
    from userdp.data.tokens import tokenise

    rows = tokenise(UserStore.open(path), Words(), sequence_length=32)
    index = rows.index()
    rng = np.random.default_rng(0)

    def cohort() -> np.ndarray[Any, Any]:
        return rng.choice(index.num_users, COHORT, replace=False)

    def ours(users: np.ndarray[Any, Any]) -> tuple[Any, Any]:
        starts = index.indptr[users]
        counts = np.minimum(index.indptr[users + 1] - starts, GROUP)
        ends = np.cumsum(counts)
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
        return rows.padded(index.rows[positions], pad_token=0)

    frame = pd.DataFrame({"user": np.asarray(rows.owners), "row": np.arange(len(rows))})

    def pandas(users: np.ndarray[Any, Any]) -> tuple[Any, Any]:
        found = frame[frame["user"].isin(users)].groupby("user", sort=False).head(GROUP)
        return rows.padded(found["row"].to_numpy(), pad_token=0)

    for attempt in (ours, pandas):
        attempt(cohort())
    our_seconds = timed(lambda: ours(cohort()), 20)
    pandas_seconds = timed(lambda: pandas(cohort()), 5)
    return {
        "records": len(rows),
        "cohort_milliseconds": round(our_seconds * 1e3, 2),
        "pandas_milliseconds": round(pandas_seconds * 1e3, 1),
        "times_faster_than_pandas": round(pandas_seconds / our_seconds, 1),
        **waiting(Prefetched, (ours(cohort()) for _ in range(41))),
    }


def waiting(prefetched: Any, cohorts: Iterator[tuple[Any, Any]]) -> dict[str, Any]:
    """A small model trained on the cohorts: how long does it wait for them?"""
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Embedding(64, 32),
        torch.nn.Linear(32, 32),
        torch.nn.ReLU(),
        torch.nn.Linear(32, 64),
    )
    loader = prefetched(cohorts)
    for ids, labels in loader:
        logits = model(torch.from_numpy(ids)[:, :-1])
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(labels)[:, 1:].flatten()
        ).backward()
    return {
        "step_milliseconds": round(loader.seconds / 40 * 1e3, 1),
        "share_waited": round(loader.share_waited, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--users", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="userdp-bench-") as temporary:
        folder = Path(temporary)
        source = folder / "source.jsonl"
        write_source(source, options.records, options.users)
        result = {"import": import_ratio(folder, source, options.repeats)}
        result["store"] = store_access(folder / "store0")
        result["random_access"] = random_access(folder / "store0")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
