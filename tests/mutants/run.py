"""Plant every fault, one at a time, and see that its test fails: `make test-mutants`.

First all named tests run once on the tree as it is, where they must pass. Then each fault is put
into a copy of the package, and its test alone runs against that copy. Exit code 1 if a fault is
stale, survives, or breaks the program in a way that no test is needed to notice.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import judge
import planted
from planted import ROOT, Mutant

# A test that takes longer than this with a fault in the tree is not quick enough to be named.
LONGEST_SECONDS = 120
# Importing these takes longer than most tests. One process does it once, and every test runs in a
# fork of that process.
PRELOADED = [
    "dp_accounting.pld",
    "duckdb",
    "hypothesis",
    "ibis",
    "numba",
    "peft",
    "pyarrow",
    "pytest",
    "scipy.stats",
    "torch",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "typer",
]
CONTEXT = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one planted fault, what its test raised, and what it printed."""

    mutant: Mutant
    verdict: str
    reason: str
    seconds: float
    output: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the faults asked for; the exit code."""
    parser = argparse.ArgumentParser(description="Plant faults; their tests must fail.")
    parser.add_argument("-k", metavar="PATTERN", default="", help="only faults whose name has it")
    parser.add_argument("--jobs", type=int, default=2, help="faults at the same time (2)")
    parser.add_argument("--skip-clean", action="store_true", help="not the tree as it is first")
    options = parser.parse_args(arguments)
    mutants = [m for m in planted.load() if re.search(options.k, f"{m.area}: {m.name}")]
    old = [(m, why) for m in mutants if (why := planted.stale(m)) is not None]
    for mutant, why in old:
        print(f"stale    {mutant.area}: {mutant.name}: {why}")
    if old or not mutants:
        print(f"{len(mutants)} faults, {len(old)} of them stale: nothing was run.")
        return 1
    os.environ["OMP_NUM_THREADS"] = "1"
    begin = time.monotonic()
    if not options.skip_clean and not _passes_as_it_is(mutants, options.jobs):
        print("a named test fails on the tree as it is: nothing can be learnt from it.")
        return 1
    CONTEXT.set_forkserver_preload(PRELOADED)
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for done, outcome in enumerate(pool.map(try_out, mutants), 1):
            outcomes.append(outcome)
            mutant = outcome.mutant
            print(
                f"{done:4}/{len(mutants)}  {outcome.verdict:8}  {outcome.seconds:5.1f} s  "
                f"{mutant.area}: {mutant.name}" + f" ({outcome.reason})" * bool(outcome.reason),
                flush=True,
            )
    return _summary(outcomes, time.monotonic() - begin)


def try_out(mutant: Mutant, root: Path = ROOT) -> Outcome:
    """Plant one fault in a copy of the package and run its test there."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        source, output = Path(folder) / "src", Path(folder) / "output"
        planted.plant(mutant, source, root)
        process = CONTEXT.Process(
            target=judge.judge,
            args=(mutant.module, mutant.test),
            kwargs={"root": root, "source": source, "output": output},
        )
        process.start()
        process.join(LONGEST_SECONDS)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
        printed = output.read_text(errors="replace") if output.is_file() else ""
    last = "no end" if late else printed.rstrip().rpartition("\n")[2]
    verdict, _, reason = last.partition(" ")
    return Outcome(
        mutant=mutant,
        verdict=verdict if verdict in (judge.CAUGHT, judge.SURVIVED) else judge.BROKEN,
        reason=reason,
        seconds=time.monotonic() - begin,
        output=printed + f"no end after {LONGEST_SECONDS} s\n" * late,
    )


def _passes_as_it_is(mutants: Sequence[Mutant], jobs: int) -> bool:
    tests = sorted({mutant.test for mutant in mutants})
    print(f"{len(tests)} tests on the tree as it is", flush=True)
    options = ["-q", "-m", "not gpu", "-n", str(jobs), "--dist", "loadfile"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def _summary(outcomes: Sequence[Outcome], seconds: float) -> int:
    """Print the missed ones with what their tests said, and a table by area."""
    missed = [outcome for outcome in outcomes if outcome.verdict != judge.CAUGHT]
    for outcome in missed:
        mutant = outcome.mutant
        print(f"\n---- {outcome.verdict}: {mutant.area}: {mutant.name}\n{mutant.test}")
        print(outcome.output[-2000:])
    counts = collections.Counter((o.mutant.area, o.verdict) for o in outcomes)
    kinds = (judge.CAUGHT, judge.SURVIVED, judge.BROKEN)
    print(f"\n{'area':14}" + "".join(f"{kind:>10}" for kind in kinds))
    for area in sorted({outcome.mutant.area for outcome in outcomes}):
        print(f"{area:14}" + "".join(f"{counts[area, kind]:10}" for kind in kinds))
    caught = len(outcomes) - len(missed)
    print(f"{caught} of {len(outcomes)} planted faults caught in {seconds / 60:.1f} minutes.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
