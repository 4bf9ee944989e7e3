"""What is left of the bare step's speed in a whole private run.

A run samples ragged Poisson cohorts, loads and packs their rows, clips, draws the noise, writes the
ledger to disk and steps the optimizer, in batches of the usual size. Its tokens per second, once
every batch shape has been seen, are compared with those of the bare step (gradients and clipping)
on full batches of 16,384 tokens; `useful` counts tokens of records, `padded` also what padding
adds. The two take turns in one process, each for some seconds: a device that has just begun to work
may run at a higher clock. Records fill their rows but for a user's last, or with `--short` are as
short as posts and chat messages are. `--rows` takes real records, from a file of
`reproductions.finetuning.prepare` without `--join`. Then the model is also measured on the file's
held-out users, and `useful_share_with_evaluation` is what is left in a run of 500 steps that does
so before the first one and after every 100th.

Clipping costs more where users are small. So there is a second bare step, whose users have as many
rows as the run's hold tokens in a step on average, rounded up. `useful_share_of_own_size` is the
share of its rate. `--bare-group-sizes 4 8` compares with further ones.

With `--cold` only the first `--warm` steps run, and some more at full speed. What is measured is
how long it takes until no step brings a new batch shape any more, and how much longer the first
steps took than at full speed. A second process finds what the first one left on disk.

Run: python benchmarks/training_run.py [--short | --rows FILE] [--join yes] [--cold] [--json FILE]
(CPU: a tiny model)
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clipping import CLIP, GPT2, LLAMA, Setting, Step, captured, count, new_file, refuse_uneven
from userdp.clipping.fast import FastClipping
from userdp.clipping.settings import StepSettings
from userdp.data.tokens import TokenRows
from userdp.evaluation import evaluate
from userdp.ledger.book import Ledger
from userdp.plan import Plan
from userdp.runs.record import RunRecord
from userdp.step import PrivateStep
from userdp.streams import RunSecret
from userdp.tasks import CausalTask, cohort_batches

# The run whose evaluations are counted in.
RUN_STEPS = 500
EVALUATE_EVERY = 100


def ragged_rows(
    users: int, length: int, group_size: int, vocabulary: int, *, short: bool
) -> TokenRows:
    """Users with a heavy tail of rows; of each user's rows the last is cut short, or most are."""
    rng = np.random.default_rng(0)
    counts = np.clip(rng.lognormal(np.log(1.5 * group_size), 1.0, users).astype(int), 1, None)
    owners = np.repeat(np.arange(users), counts)
    lengths = np.full(len(owners), length)
    lengths[np.cumsum(counts) - 1] = rng.integers(2, length + 1, users)
    if short:
        drawn = rng.lognormal(np.log(length / 5), 0.9, len(owners)).astype(int)
        lengths = np.clip(drawn, 2, length)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    tokens = rng.integers(0, vocabulary, indptr[-1], dtype=np.int32)
    return TokenRows(tokens=tokens, indptr=indptr, owners=owners, num_users=users)


def real_rows(path: Path, part: str) -> TokenRows:
    """The rows of a prepared set that are for training (`train`) or evaluation (`test`)."""
    with np.load(path) as file:
        return TokenRows(
            tokens=file[f"{part}_tokens"].astype(np.int32),
            indptr=file[f"{part}_indptr"],
            owners=file[f"{part}_owners"],
            num_users=int(file[f"{part}_num_users"]),
        )


def rows_of_mean_user(rows: TokenRows, group_size: int, length: int) -> int:
    """How many full rows hold the tokens that a user has in a step, on average, rounded up."""
    lengths, owners = np.diff(rows.indptr), np.asarray(rows.owners)
    tokens = np.bincount(owners, weights=lengths, minlength=rows.num_users)
    counts = np.bincount(owners, minlength=rows.num_users)
    share = np.minimum(counts, group_size) / np.maximum(counts, 1)
    return max(1, math.ceil(float((tokens * share).mean()) / length))


def main() -> None:
    """Measure one setting."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", choices=[*GPT2, *LLAMA], default="gpt2" if gpu else "gpt2-tiny")
    parser.add_argument("--finetune", choices=["lora", "full"], default="full")
    parser.add_argument("--length", type=count, default=128 if gpu else 64)
    parser.add_argument("--group-size", type=count, default=16 if gpu else 4)
    parser.add_argument("--cohort", type=count, default=64 if gpu else 16)
    parser.add_argument("--warm", type=count, default=60 if gpu else 2)
    parser.add_argument("--steps", type=count, default=40 if gpu else 4)
    parser.add_argument(
        "--stretch", type=count, default=10, help="steps timed together: the host may run ahead"
    )
    records = parser.add_mutually_exclusive_group()
    records.add_argument("--short", action="store_true")
    records.add_argument("--rows", type=Path, help="real records, as `prepare` writes them")
    parser.add_argument(
        "--bare-group-sizes", type=count, nargs="+", default=[], help="of further bare steps' users"
    )
    parser.add_argument("--join", choices=["yes", "no"], help="as the device prefers if not given")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--json", type=new_file)
    options = parser.parse_args()
    tokens = 16_384 if gpu else 2_048
    refuse_uneven(parser, tokens, options.length, options.group_size)
    setting = Setting(options.model, options.finetune, options.length, tokens)
    if options.rows:
        rows = real_rows(options.rows, "train")
    else:
        rows = ragged_rows(5_000, options.length, options.group_size, 2_000, short=options.short)
    own_size = rows_of_mean_user(rows, options.group_size, options.length)
    sizes = list(dict.fromkeys([options.group_size, own_size, *options.bare_group_sizes]))
    plan = Plan.sample_users(
        num_users=rows.num_users,
        expected_cohort_size=options.cohort,
        group_size=options.group_size,
        steps=options.warm + options.steps,
        clip_norm=CLIP.clip_norm,
        noise_multiplier=1.0,
        delta=1e-6,
    )
    with tempfile.TemporaryDirectory() as folder:
        secret = RunSecret.from_system()
        ledger = Ledger.create(
            plan, path=Path(folder) / "ledger.jsonl", bound_to={}, fixed_seed=False
        )
        step = PrivateStep(
            setting.model,
            torch.optim.AdamW(setting.parameters, lr=1e-5, fused=gpu),
            plan,
            rows.index(),
            settings=StepSettings(
                compute_dtype=setting.dtype,
                join_records=None if options.join is None else options.join == "yes",
            ),
            sequence_length=options.length,
            record=RunRecord(ledger, secret),
        )
        if options.cold:
            report(first_steps(step, rows, options.warm) | {"finetune": options.finetune}, options)
            return
        bare = {size: Bare(setting, size) for size in sizes}
        rates = run(step, rows, list(bare.values()), options.warm, options.stretch)
        ledger.close()
    if options.rows:
        seconds = evaluation_seconds(setting, real_rows(options.rows, "test"))
        spent = RUN_STEPS * rates["tokens"] / rates["useful"]
        evaluated = spent + (1 + RUN_STEPS // EVALUATE_EVERY) * seconds
        rates |= {"evaluation": seconds, "with_evaluation": rates["useful"] * spent / evaluated}
    row = {
        "model": options.model,
        "finetune": options.finetune,
        "group_size": options.group_size,
        "sequence_length": options.length,
        "bare_tokens_per_second": bare[options.group_size].rate,
        "useful_share": rates["useful"] / bare[options.group_size].rate,
        "padded_share": rates["padded"] / bare[options.group_size].rate,
        "own_group_size": own_size,
        "useful_share_of_own_size": rates["useful"] / bare[own_size].rate,
        "useful_share_by_bare_group_size": {
            size: rates["useful"] / other.rate for size, other in bare.items()
        },
        "evaluation_seconds": rates.get("evaluation"),
        "useful_share_with_evaluation": rates["with_evaluation"] / bare[options.group_size].rate
        if options.rows
        else None,
        "own_size_with_evaluation": rates["with_evaluation"] / bare[own_size].rate
        if options.rows
        else None,
        "useful_tokens_a_step": rates["tokens"],
        "cohort": options.cohort,
        "short": options.short,
        "rows": options.rows and options.rows.stem,
        "join": options.join,
        "steps": rates["steps"],
    }
    report(row, options)


def report(row: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the row, and write it where that is asked for."""
    print(json.dumps(row))
    if options.json:
        options.json.write_text(json.dumps([row], indent=1) + "\n")


def first_steps(step: PrivateStep, rows: TokenRows, number: int) -> dict[str, Any]:
    """How long the first steps take, and when the last one with a new batch shape ended.

    `lost_seconds` is how much longer they took than as many of the steps that follow.
    """
    clipping = step._checked.summation
    assert isinstance(clipping, FastClipping)
    task = CausalTask(pad_token=0)
    # When each step that brought a new shape ended.
    ends: list[float] = []

    def take() -> bool:
        """One step; whether it brought a new shape."""
        before = len(clipping._add_by_shape)
        streams, cohort = step.record.streams("rows"), step.draw()
        step.apply(cohort_batches(rows, cohort, task, step=step.record.steps, streams=streams))
        return len(clipping._add_by_shape) > before

    began = time.perf_counter()
    for _ in range(number):
        if take():
            synchronise()
            ends.append(time.perf_counter() - began)
    synchronise()
    seconds, shapes = time.perf_counter() - began, len(clipping._add_by_shape)
    full_speed = time.perf_counter()
    taken = 0
    while step.steps_left:
        taken += 1
        if take():
            # How long the steps before took is not known.
            synchronise()
            full_speed, taken = time.perf_counter(), 0
    synchronise()
    each = (time.perf_counter() - full_speed) / taken if taken else None
    return {
        "first_steps": number,
        "seconds": seconds,
        "shapes": shapes,
        "last_new_shape_after_seconds": max(ends, default=0.0),
        "new_shapes_after_seconds": [round(end, 2) for end in ends],
        "step_seconds": each,
        "lost_seconds": None if each is None else seconds - number * each,
    }


class Bare:
    """Gradients and their clipping on full batches, and how long they took."""

    def __init__(self, setting: Setting, group_size: int) -> None:
        self._setting, self._group_size = setting, group_size
        self.tokens = (setting.rows - setting.rows % group_size) * setting.length
        self._step: Step | None = None
        self.batches, self.seconds = 0, 0.0

    def step(self) -> None:
        """One batch: compiled, and captured where there are graphs."""
        if self._step is None:
            # Not before the run has its own memory: how large its batches are depends on what is
            # free when it begins.
            self._step = self._setting.userdp(self._group_size)
            self._step()
            if self._setting.on_gpu:
                self._step = captured(self._step, None)
        self._step()

    def run(self, tokens: int) -> None:
        """So many tokens, to the next batch."""
        batches = max(1, round(tokens / self.tokens))
        if self._step is None:
            self.step()
        synchronise()
        began = time.perf_counter()
        for _ in range(batches):
            self.step()
        synchronise()
        self.seconds += time.perf_counter() - began
        self.batches += batches

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.batches * self.tokens / self.seconds


def run(
    step: PrivateStep, rows: TokenRows, bare: list[Bare], warm: int, together: int
) -> dict[str, float]:
    """Useful and padded tokens per second after the first `warm` steps, in turns with bare ones.

    Steps that bring a shape not seen before (and compile it) are left out.
    """
    clipping = step._checked.summation
    assert isinstance(clipping, FastClipping)
    padded = [0]
    count_padded(clipping, padded)
    lengths = np.diff(rows.indptr)
    sums = {"useful": 0, "padded": 0, "seconds": 0.0, "steps": 0}
    stretch: dict[str, float] = {}
    shapes = len(clipping._add_by_shape)

    def begin() -> None:
        synchronise()
        stretch.update(useful=0, steps=0, began=time.perf_counter())
        padded[0] = 0

    started = time.perf_counter()
    task = CausalTask(pad_token=0)
    begin()
    for number, cohort in enumerate(step.cohorts()):
        useful = sum(int(lengths[np.asarray(group)].sum()) for group in cohort)
        streams = step.record.streams("rows")
        step.apply(cohort_batches(rows, cohort, task, step=step.record.steps, streams=streams))
        stretch["useful"] += useful
        stretch["steps"] += 1
        compiled = clipping._graphs and len(clipping._add_by_shape) > shapes
        if compiled or number + 1 == warm:
            # How long the steps before the new shape took is not known: the stretch is dropped.
            shapes = len(clipping._add_by_shape)
            if number + 1 == warm:
                took = time.perf_counter() - started
                print(f"{warm} steps, {shapes} shapes: {took:.0f} s", flush=True)
            begin()
        elif number + 1 > warm and (stretch["steps"] == together or not step.steps_left):
            synchronise()
            sums["seconds"] += time.perf_counter() - stretch["began"]
            sums["useful"] += stretch["useful"]
            sums["padded"] += padded[0]
            sums["steps"] += stretch["steps"]
            rate = sums["useful"] / sums["seconds"]
            for other in bare:
                other.run(padded[0])
            found = ", ".join(f"{other.rate:.0f}" for other in bare)
            print(f"{sums['steps']} steps: {rate:.0f} tokens a second of {found}", flush=True)
            begin()
    assert sums["steps"], "every stretch of steps brought a new shape: run more"
    return {name: sums[name] / sums["seconds"] for name in ("useful", "padded")} | {
        "steps": sums["steps"],
        "tokens": sums["useful"] / sums["steps"],
    }


def evaluation_seconds(setting: Setting, rows: TokenRows) -> float:
    """How long the model is measured on these rows: the median of three times, after a first."""
    taken: list[float] = []
    for _ in range(4):
        synchronise()
        began = time.perf_counter()
        evaluate(setting.model, rows, pad_token=0, compute_dtype=setting.dtype)
        taken.append(time.perf_counter() - began)
    return sorted(taken[1:])[1]


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def count_padded(clipping: FastClipping, padded: list[int]) -> None:
    """Count what the fast path runs, padding included."""
    honest = clipping._add_users

    def counted(users, make):  # type: ignore[no-untyped-def]
        padded[0] += users.batch["input_ids"].numel()
        honest(users, make)

    clipping._add_users = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
