"""What durable runs cost: checkpoints beside the training, long ledgers, and going on.

    stall    time of steps with checkpoints over time without, in turns in one process
    memory   growth of the process over many tiny steps, after the first thousand
    resume   seconds to go on with a run, more than loading its model takes

Run: python benchmarks/durability.py [--only resume] [--steps 20000] [--json FILE]     (minutes)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import userdp
from userdp.data.record import Record
from userdp.data.store import UserStore, write_store
from userdp.quickstart import word_tokenizer
from userdp.runs.checkpoints import Saving

WORDS = tuple("red green blue amber violet grey pink teal black white".split())


def make(root: Path, *, width: int, layers: int) -> Path:
    """A store of 200 users and a GPT-2 of this size."""
    rng = np.random.default_rng(0)
    records = [
        Record(text=" ".join(rng.choice(WORDS, size=24)), owners=(f"u{user}",), where=str(user))
        for user in range(200)
        for _ in range(2)
    ]
    write_store(records, root / "store", key=bytes(32))
    tokenizer = word_tokenizer(WORDS)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_positions=64, n_embd=width, n_layer=layers, n_head=2
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    return root


def run(root: Path, out: Path, steps: int, saving: Saving, **options: Any) -> None:
    """One run of `userdp.train`."""
    model, tokenizer = userdp.load_model(root / "model")
    plan = userdp.Plan.sample_users(
        num_users=200,
        expected_cohort_size=8,
        group_size=2,
        steps=steps,
        clip_norm=1.0,
        noise_multiplier=5.0,
        delta=1e-3,
    )
    store = UserStore.open(root / "store")
    userdp.train(
        model, tokenizer, store, plan, sequence_length=32, out=out, saving=saving, **options
    )


def stall(root: Path, *, every: int, turns: int) -> dict[str, float]:
    """What a checkpoint adds to a run, and which share that is at the usual five minutes."""
    times: dict[str, list[float]] = {"with": [], "without": []}
    for turn in range(turns):
        for name in times:
            begun: list[float] = []
            saving = Saving(every_steps=every if name == "with" else 10**9)
            run(
                root,
                root / f"{name}{turn}",
                STALL_STEPS,
                saving,
                on_step=lambda _, begun=begun: begun.append(time.perf_counter()),
            )
            # The first steps find their batch shapes; the last save is the run's end.
            times[name].append(begun[-1] - begun[STALL_STEPS // 10])
    saved = sum(p.stat().st_size for p in (root / "with0" / "checkpoints").rglob("*.safetensors"))
    saves = sum(step % every == 0 for step in range(STALL_STEPS // 10 + 1, STALL_STEPS))
    added = float(np.median(times["with"]) - np.median(times["without"])) / saves
    return {
        "ratio": float(np.median(times["with"]) / np.median(times["without"])),
        "seconds_between_checkpoints": float(np.median(times["without"])) / saves,
        "seconds_a_checkpoint_adds": added,
        "share_every_five_minutes": added / 300,
        "checkpoint_megabytes": saved / 2 / 1e6,
    }


STALL_STEPS = 60


def resident() -> int:
    """Bytes of memory that the process holds."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(root: Path, steps: int) -> dict[str, float]:
    """How much the process grows over a long run."""
    seen: dict[int, int] = {}

    def note(done: int) -> None:
        if done in (1000, steps):
            seen[done] = resident()

    run(root, root / "long", steps, Saving(every_steps=500), on_step=note)
    begun = time.perf_counter()
    userdp.Ledger.read(root / "long" / "ledger.jsonl")
    return {
        "steps": steps,
        "megabytes_after_1000": seen[1000] / 1e6,
        "megabytes_at_the_end": seen[steps] / 1e6,
        "growth": seen[steps] / seen[1000] - 1,
        "seconds_to_verify_the_ledger": time.perf_counter() - begun,
    }


def resume(root: Path, steps: int) -> dict[str, float]:
    """Seconds from the call to the first new step, less what loading the model takes."""

    class Stop(Exception):
        pass

    def stop_at(number: int) -> Any:
        def on_step(done: int) -> None:
            if done == number:
                raise Stop

        return on_step

    saving = Saving(every_steps=steps // 2)
    with contextlib.suppress(Stop):
        # A step is announced before its checkpoint is saved, so the stop comes one step later.
        run(root, root / "stopped", steps, saving, on_step=stop_at(steps // 2 + 1))
    begun = time.perf_counter()
    userdp.load_model(root / "model")
    loading = time.perf_counter() - begun
    ends: list[float] = []

    def two_steps(_: int) -> None:
        ends.append(time.perf_counter())
        if len(ends) == 2:
            raise Stop

    begun = time.perf_counter()
    with contextlib.suppress(Stop):
        run(root, root / "stopped", steps, saving, resume=True, on_step=two_steps)
    a_step = ends[1] - ends[0]
    return {
        "steps": steps,
        "loading_s": loading,
        "step_s": a_step,
        "more_than_loading_s": ends[0] - begun - a_step - loading,
    }


def main() -> None:
    """Measure all three."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=12, help="steps between checkpoints")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", choices=["resume", "stall", "memory"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        small = make(Path(scratch) / "small", width=16, layers=1)
        large = make(Path(scratch) / "large", width=512, layers=8)
        measures = {
            "resume": lambda: resume(large, 20),
            "stall": lambda: stall(large, every=options.every, turns=options.turns),
            "memory": lambda: memory(small, options.steps),
        }
        for name, measure in measures.items():
            if options.only in (None, name):
                found[name] = measure()
                print(json.dumps({name: found[name]}), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
