"""Fine-tunes one model under many settings, and measures each on held-out users.

A table (`settings`) lists the runs. If a row's `rate` is null, it is the best one of the earlier
runs on the set `tune_on`, with the same recipe and epsilon where there are such: other people's
data. Every run begins with the same public weights. Its epsilon is that of its own plan, with the
real number of users, unless `times_users` says how many times as many are priced; such rows are
hypothetical, and say so.

The loop here is the private step without its record: nothing is released, and no run leaves a
statement. All runs of one kind of adapter share a model, so that its batches are compiled once.

Run: python -m reproductions.finetuning.compare MODEL rows/ --table tables/epsilon.json --json FILE
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from reproductions.finetuning.sets import Set, record_losses
from reproductions.finetuning.settings import (
    Setting,
    asked_for,
    clip_of,
    plan_of,
    settings_of,
    share_of_rate,
)
from userdp.clipping.fast import FastClipping
from userdp.clipping.settings import StepSettings
from userdp.data.choose import Choice
from userdp.data.tokens import TokenRows
from userdp.evaluation import Evaluation, evaluate
from userdp.index import IGNORED_LABEL, Rows
from userdp.losses import Batch, causal_lm_loss
from userdp.models.adapters import Lora, add_lora
from userdp.models.load import load_model
from userdp.streams import RunSecret

EVALUATION_TOKENS = 16_384


class Bench:
    """A model with one kind of adapter, set back to its public weights before every run."""

    def __init__(self, base: nn.Module, setting: Setting, *, length: int, compiled: bool) -> None:
        device = next(base.parameters()).device
        torch.manual_seed(0)
        self.model = copy.deepcopy(base)
        if setting.rank:
            names = setting.targets
            targets = names if names == "all-linear" else names.split("+")
            lora = Lora(rank=setting.rank, alpha=2.0 * setting.rank, targets=targets)
            self.model = add_lora(self.model, lora).to(device)
        self.model.eval()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self._begin = [parameter.detach().clone() for parameter in self.trained]
        self.summation = FastClipping(
            self.model,
            self.trained,
            clip_of(setting),
            record_loss=causal_lm_loss,
            settings=StepSettings(
                compute_dtype=torch.bfloat16 if device.type == "cuda" else None,
                compile_blocks=compiled,
                # The paths are compared by the tests.
                check=False,
            ),
            sequence_length=length,
        )

    def reset(self) -> None:
        """The public weights, in place: captured steps read them where they are."""
        with torch.no_grad():
            for parameter, value in zip(self.trained, self._begin, strict=True):
                parameter.copy_(value)


def optimizer_of(setting: Setting, trained: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam, or SGD with momentum."""
    assert setting.rate is not None
    if setting.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=setting.rate, momentum=0.9)
    return torch.optim.Adam(trained, lr=setting.rate, fused=trained[0].is_cuda)


def full_rows(rows: TokenRows, group: Rows, *, end: int, length: int) -> Batch:
    """The group's rows, all of one length, so that few batch shapes occur."""
    ids, labels = rows.padded(group, pad_token=end)
    wide = ((0, 0), (0, length - ids.shape[1]))
    return {
        "input_ids": torch.from_numpy(np.pad(ids, wide, constant_values=end)),
        "labels": torch.from_numpy(np.pad(labels, wide, constant_values=IGNORED_LABEL)),
    }


def measured(model: nn.Module, found: Set) -> Evaluation:
    """The loss of the held-out users, with products rounded as TF32.

    Those of training are not: there an update's norm would be off by more than clipping allows for.
    """
    torch.set_float32_matmul_precision("high")
    try:
        return evaluate(model, found.test, pad_token=found.end, batch_tokens=EVALUATION_TOKENS)
    finally:
        torch.set_float32_matmul_precision("highest")


def run(
    setting: Setting, bench: Bench, found: Set, length: int, losses: np.ndarray | None
) -> dict[str, Any]:
    """Train once from the public weights and measure on the held-out users.

    `losses` are those of the training records, for the selections by perplexity.
    """
    began = time.perf_counter()
    bench.reset()
    secret = RunSecret.fixed_for_tests(setting.seed)
    chosen = found.contributions(
        setting.select,
        method=setting.method,
        k=setting.k,
        length=length,
        secret=secret,
        losses=losses,
    )
    plan = plan_of(setting, found, chosen.index())
    optimizer = optimizer_of(setting, bench.trained)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(share_of_rate, setting))
    index = plan.sampler.limit_contributions(chosen.index(), secret.streams("limit contributions"))
    noise = plan.noise.started()
    trained_rows = 0
    for step in range(setting.steps):
        cohort = plan.sampler.draw(index, step, secret.streams("cohort"))
        groups = [
            full_rows(*chosen.read(group, secret.streams("rows").rng(step, int(group[0]) + 1)),
                      end=found.end, length=length)
            for group in cohort
            if len(group)
        ]  # fmt: skip
        trained_rows += sum(len(group["input_ids"]) for group in groups)
        total = bench.summation.clipped_sum(groups, plan.clip).total
        noise.add_(
            total.values,
            offset=0,
            size=len(total.values),
            noise_stddev=plan.noise_stddev,
            step=step,
            streams=secret.streams("noise"),
        )
        total.values.div_(plan.divisor)
        for parameter, value in zip(bench.trained, total.views, strict=True):
            parameter.grad = value.to(parameter.dtype)
        optimizer.step()
        schedule.step()
    training_seconds = time.perf_counter() - began
    after = measured(bench.model, found)
    return {
        **asdict(setting),
        "loss": after.loss,
        "accuracy_top1": after.accuracy_top1,
        "noise_multiplier": plan.noise.noise_multiplier,
        "divisor": plan.divisor,
        "users": plan.num_users,
        "rows": trained_rows,
        "parameters": sum(parameter.numel() for parameter in bench.trained),
        "training_seconds": training_seconds,
        "seconds": time.perf_counter() - began,
        "hypothetical": setting.times_users != 1,
    }


def finished(path: Path | None) -> list[dict[str, Any]]:
    """The runs that an earlier call has done: they are not done again."""
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def best_rate(done: list[dict[str, Any]], tune_on: str, setting: Setting) -> float:
    """The rate with the lowest loss on the set `tune_on`, with the same recipe.

    A recipe is the kind of adapter, the clipping and the schedule. Epsilon is the same too if it
    was tried there; otherwise it is any.
    """

    def recipe(one: Setting) -> tuple[Any, ...]:
        return (one.rank, one.targets, one.clip, one.clip_norm, one.schedule)

    tried = [row for row in done if row["data"] == tune_on]
    alike = [row for row in tried if recipe(asked_for(row)) == recipe(setting)]
    same = [row for row in alike if row["epsilon"] == setting.epsilon]
    private = [row for row in alike if row["epsilon"] is not None]
    return min(same or private, key=lambda row: row["loss"])["used_rate"]


@dataclass
class Comparison:
    """Runs of one model. Sets, scores and compiled models are kept from run to run."""

    base: nn.Module
    rows: Path
    length: int
    compiled: bool
    _sets: dict[str, tuple[Set, float]] = field(default_factory=dict)
    _losses: dict[str, np.ndarray] = field(default_factory=dict)
    _benches: dict[Any, Bench] = field(default_factory=dict)

    def run(self, setting: Setting) -> dict[str, Any]:
        """One run, with the loss before it."""
        found, before = self._set(setting.data)
        kind = (setting.rank, setting.targets, setting.clip)
        if kind not in self._benches:
            self._benches[kind] = Bench(
                self.base, setting, length=self.length, compiled=self.compiled
            )
        losses = self._scores(setting.data) if Choice.of(setting.select).needs_losses else None
        row = run(setting, self._benches[kind], found, self.length, losses)
        return {**row, "loss_before": before, "used_rate": setting.rate}

    def _set(self, name: str) -> tuple[Set, float]:
        if name not in self._sets:
            found = Set.read(self.rows / f"{name}.npz")
            before = measured(self.base, found)
            self._sets[name] = found, before.loss
        return self._sets[name]

    def _scores(self, name: str) -> np.ndarray:
        if name not in self._losses:
            self._losses[name] = record_losses(self.base, self._set(name)[0])
        return self._losses[name]


def run_table(
    comparison: Comparison, table: dict[str, Any], path: Path | None, is_late: Callable[[], bool]
) -> None:
    """The runs of a table that are not in the file yet, until it is late."""
    done = finished(path)
    known = {asked_for(row) for row in done}
    for setting in settings_of(table):
        if setting in known:
            continue
        if is_late():
            print(json.dumps({"left_out": asdict(setting)}), flush=True)
            continue
        asked = setting
        if setting.rate is None:
            setting = replace(setting, rate=best_rate(done, table["tune_on"], setting))
        row = {**comparison.run(setting), **asdict(asked)}
        known.add(asked)
        done.append(row)
        print(json.dumps(row), flush=True)
        if path:
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def main(arguments: list[str] | None = None) -> None:
    """Run tables, one after the other, in one process: a kind of adapter is compiled once."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--gguf-file")
    parser.add_argument("--table", type=Path, nargs="+", required=True)
    parser.add_argument("--json", type=Path, help="a line for each run; a folder if many tables")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no run after these")
    parser.add_argument("--length", type=int, default=128, help="tokens a row, as prepared")
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base, _ = load_model(options.model, gguf_file=options.gguf_file, device=device)
    base.eval()
    comparison = Comparison(base, options.rows, options.length, options.compiled)
    for path in options.table:
        out = options.json
        if out and (out.is_dir() or len(options.table) > 1):
            out.mkdir(parents=True, exist_ok=True)
            out = out / f"{path.stem}.jsonl"
        table = json.loads(path.read_text())
        run_table(comparison, table, out, lambda: time.perf_counter() - began > options.seconds)


if __name__ == "__main__":
    main()
