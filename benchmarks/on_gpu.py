"""The figures of `docs/measurements.md` that need a GPU, each measured in a process of its own.

Nothing may run beside a measurement: it would share the clock, the power and the memory. What was
found is on disk after each, so if the machine is taken away only the measurement under way is lost.
What does not fit into `--seconds` is left out and named, and so is what fails. A later call takes
those alone (`--only`).

A process is cold that finds nothing compiled on disk. Those called `warm` come after it and find
what it left.

Run: python benchmarks/on_gpu.py --out FOLDER [--seconds 580] [--only NAME ...] [--rows FILE ...]
     FOLDER then has results.json and log.txt.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# Only these are collected: others need packages that a GPU machine may lack.
GPU_TESTS = [
    str(path)
    for path in sorted((HERE.parent / "tests").rglob("test_*.py"))
    if "mark.gpu" in path.read_text(encoding="utf-8")
]
# Warnings of a library's other version are no failures.
PYTEST = "-q -m gpu -W default".split()
LONG_STRETCHES = "--warm 60 --steps 105 --stretch 35".split()
TRAINING = [str(HERE / "training_run.py"), "--short"]
LARGE = [str(HERE / "large.py")]
# How long a process has to end by itself before it is killed with all that it started.
GRACE = 5.0


@dataclass(frozen=True)
class Measurement:
    """A program with its arguments, and the seconds that it may take."""

    name: str
    arguments: list[str]
    seconds: float
    # Measurements of the same name here share what is compiled.
    cache: str = "usual"
    writes_json: bool = True


def first_steps(name: str, finetune: str) -> Measurement:
    """How long it takes until a run is at full speed."""
    arguments = [*TRAINING, "--cold", "--warm", "40", "--finetune", finetune]
    return Measurement(f"{name}-{finetune}", arguments, 120, cache=finetune)


def whole_run(rows: Path) -> Measurement:
    """A run on the records of a file that `reproductions.finetuning.prepare` made."""
    arguments = [*TRAINING[:1], "--rows", str(rows), *LONG_STRETCHES]
    return Measurement(rows.stem, arguments, 150, cache="full")


MEASUREMENTS = [
    Measurement("tests", ["-m", "pytest", *PYTEST, *GPU_TESTS], 240, writes_json=False),
    first_steps("cold", "full"),
    first_steps("warm", "full"),
    first_steps("warm-again", "full"),
    Measurement("short", [*TRAINING, *LONG_STRETCHES], 150, cache="full"),
    Measurement("3b", [*LARGE, "full-3b", "--only", "private", "ordinary_eager"], 150),
    Measurement("8b", [*LARGE, "lora-8b", "--only", "private", "ordinary_eager"], 150),
    first_steps("cold", "lora"),
    first_steps("warm", "lora"),
    Measurement("full-rows", [*TRAINING[:1], "--warm", "40", "--steps", "60"], 150, cache="full"),
]


def main() -> None:
    """Measure what was asked for."""
    names = [each.name for each in MEASUREMENTS]
    parser = argparse.ArgumentParser(description="The figures that need a GPU, one by one.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=580, help="begin nothing that needs more")
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--rows", nargs="+", type=Path, default=[], help="whole runs on real text")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [each for each in MEASUREMENTS if each.name in options.only]
    chosen += [whole_run(rows) for rows in options.rows]
    until = time.perf_counter() + options.seconds
    with tempfile.TemporaryDirectory() as caches:
        failed = measure(chosen, options.out, until=until, caches=Path(caches))
    if failed:
        raise SystemExit(f"not measured: {' '.join(failed)}")


def measure(chosen: list[Measurement], out: Path, *, until: float, caches: Path) -> list[str]:
    """Run them in turn; the names of those that did not come to their end."""
    results: dict[str, Any] = {"commit": commit()}
    for each in chosen:
        left = until - time.perf_counter()
        # A smaller share of its time may suffice, but then a lease is spent on nothing.
        found = {"left_out": f"{left:.0f} s left"}
        if left >= each.seconds / 2:
            found = result_of(each, out, seconds=min(left, each.seconds), caches=caches)
        results[each.name] = found
        print(f"{each.name}: {json.dumps(found)}", flush=True)
        (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    return [each.name for each in chosen if {"failed", "left_out"} & results[each.name].keys()]


def result_of(each: Measurement, out: Path, *, seconds: float, caches: Path) -> dict[str, Any]:
    """The measurement's own JSON, how long it took, and how it failed if it did."""
    own = caches / each.cache
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(own / "inductor"),
        "TRITON_CACHE_DIR": str(own / "triton"),
        "XDG_CACHE_HOME": str(own / "home"),
        # The libraries' bytecode, which an installation keeps beside them. Not all machines let it.
        "PYTHONPYCACHEPREFIX": str(own / "bytecode"),
        "PYTHONUNBUFFERED": "1",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    file = caches / f"{each.name}.json"
    given = ["--json", str(file)] if each.writes_json else []
    began = time.perf_counter()
    with (out / "log.txt").open("a") as log:
        print(f"==== {each.name}", file=log, flush=True)
        process = subprocess.Popen(
            [sys.executable, *each.arguments, *given],
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
        try:
            status: int | str = process.wait(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            stop(process)
            status = f"ended after {seconds:.0f} s"
    found: dict[str, Any] = {"seconds": round(time.perf_counter() - began, 1)}
    if file.is_file():
        found["result"] = json.loads(file.read_text())
    elif status == 0:
        found["result"] = "passed"
    return found if status == 0 else found | {"failed": status}


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the process with those that compile for it, kindly first."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE)


def commit() -> str:
    """The commit that is measured, where this is a checkout."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
