"""What noise costs: each kind beside a copy of the same bytes, and as a share of a private step.

    PYTHONPATH=src python benchmarks/noise.py [--quick] [--out FILE]

On a GPU: float32 noise for the 124,439,808 weights of GPT-2 small. The floor is a copy in the same
run. It moves two vectors, as reading and writing the sum does; correlated noise of b bands moves
b + 2 (its b - 1 stored vectors read, one written, the sum read and written). Times are medians of
CUDA events over repeated launches; the host's work for a launch is in them.

On the CPU: nanoseconds a number, on one thread.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from userdp.noise import Discrete
from userdp.noise.correlate import add_from_streams_, advance_
from userdp.noise.draw import add_normal_
from userdp.streams import RunSecret

GPT2_WEIGHTS = 124_439_808
# The private step of GPT-2 small, all weights, 128 tokens a record (docs/measurements.md).
STEP_MS = 34.9
BANDS = 16
LORA_WEIGHTS, MANY_WEIGHTS = 300_000, 10_000_000

# Discrete noise is drawn by compiled loops.
HAS_NUMBA = importlib.util.find_spec("numba") is not None

Row = dict[str, Any]


def streams(randomness: str) -> Any:
    return RunSecret.fixed_for_tests(0).streams("noise", randomness)


def has_cipher() -> bool:
    try:
        streams("chacha20").rng(0)
    except Exception:
        return False
    return True


def cuda_ms(run: Callable[[int], None], repeats: int) -> float:
    """The median time of one call."""
    for step in range(3):
        run(step)
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for mark, step in zip(marks, range(3, 3 + repeats), strict=False):
        mark.record()
        run(step)
    marks[-1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


def on_gpu(size: int, repeats: int) -> list[Row]:
    values, other = (torch.zeros(size, device="cuda") for _ in range(2))
    copy = cuda_ms(lambda _: other.copy_(values), repeats)
    rows: list[Row] = []

    def measured(what: str, vectors: int, run: Callable[[int], None]) -> None:
        took = cuda_ms(run, repeats)
        rows.append(
            {
                "what": what,
                "ms": round(took, 4),
                "of_copy": round(took / copy, 3),
                # What a copy would take for the same number of vectors.
                "of_its_bytes": round(took / (copy * vectors / 2), 3),
                "gigabytes": round(4e-9 * size * vectors, 3),
                "of_step": round(took / STEP_MS, 4),
            }
        )

    measured("copy", 2, lambda _: other.copy_(values))
    measured("torch.normal_, float32, no sum", 1, lambda _: other.normal_())
    at: dict[str, Any] = {"offset": 0, "size": size, "stddev": 1.0}
    for randomness in ("philox", "chacha20"):
        given = at | {"streams": streams(randomness)}
        measured(f"gaussian {randomness}", 2, lambda s, g=given: add_normal_(values, step=s, **g))
    row = (1.0 / np.sqrt(1 + np.arange(BANDS))).tolist()
    past = torch.zeros(BANDS - 1, size, device="cuda")
    for randomness in ("philox", "chacha20"):
        given = at | {"streams": streams(randomness)}
        measured(
            f"banded b={BANDS} {randomness}",
            BANDS + 2,
            lambda s, g=given: advance_(values, past, row, step=s, **g),
        )
        rows[-1]["vectors_over_stored"] = round((BANDS + 2) / (BANDS - 1), 3)
    given = at | {"streams": streams("philox")}
    measured(
        f"inverse banded b={BANDS} philox, nothing stored",
        2,
        lambda s: add_from_streams_(values, row, step=s + BANDS, **given),
    )
    for weights in (LORA_WEIGHTS, MANY_WEIGHTS) if HAS_NUMBA else ():
        rows.append({"what": f"discrete {weights:,}, drawn on the CPU"} | discrete(weights, "cuda"))
    return rows


def seconds(run: Callable[[int], object], repeats: int) -> float:
    run(0)
    took: list[float] = []
    for step in range(1, 1 + repeats):
        start = time.perf_counter()
        run(step)
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def discrete(size: int, device: str, repeats: int = 3, randomness: str = "philox") -> Row:
    values, noise = torch.zeros(size, device=device), Discrete(noise_multiplier=1.0)
    given = streams(randomness)

    def run(step: int) -> None:
        noise.add_(values, offset=0, size=size, noise_stddev=1.0, step=step, streams=given)
        if device == "cuda":
            torch.cuda.synchronize()

    took = seconds(run, repeats)
    return {"ms": round(1e3 * took, 2), "ns_a_number": round(1e9 * took / size, 1)}


def on_cpu(size: int, repeats: int) -> list[Row]:
    rows: list[Row] = []

    def measured(what: str, run: Callable[[int], object]) -> None:
        took = seconds(run, repeats)
        rows.append({"what": what, "ns_a_number": round(1e9 * took / size, 2)})

    values, other = torch.zeros(size), torch.zeros(size)
    measured("copy", lambda _: other.copy_(values))
    philox = streams("philox")
    measured("numpy float32 normals", lambda s: philox.rng(s).standard_normal(size, dtype="f4"))
    for randomness in ("philox", *(["chacha20"] if has_cipher() else [])):
        given: dict[str, Any] = {"offset": 0, "size": size, "streams": streams(randomness)}
        measured(
            f"gaussian {randomness}",
            lambda s, g=given: add_normal_(values, stddev=1.0, step=s, **g),
        )
        for count in (min(size, LORA_WEIGHTS), size) if HAS_NUMBA else ():
            took = discrete(count, "cpu", repeats, randomness)
            rows.append({"what": f"discrete {randomness} {count:,}"} | took)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="Small sizes, to see that it runs.")
    parser.add_argument("--out", type=Path, help="Also write the rows as JSON.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"step_ms": STEP_MS, "torch": torch.__version__}
    size, repeats = (2**16, 1) if given.quick else (MANY_WEIGHTS, 3)
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["gpu"] = on_gpu(2**20 if given.quick else GPT2_WEIGHTS, 5 if given.quick else 50)
    found["cpu"] = on_cpu(size, repeats)
    for place in ("gpu", "cpu"):
        for row in found.get(place, []):
            print(place, json.dumps(row), flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
