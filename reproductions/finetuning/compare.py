"""Fine-tunes one model under many settings, and measures each on held-out users.

A table is a JSON file: `defaults` and `rows`, each row with settings of its own; a list of values
stands for one run for each of them. If a row's `rate` is null, it is the best one of the earlier
rows on the set `tune_on`, at the same epsilon where there are such: other people's data. Every run
begins with the same public weights. Its epsilon is that of its own plan, with the real number of
users, unless `times_users` says how many times as many are priced; such rows are hypothetical, and
say so.

The loop here is the private step without its record: nothing is released, and no run leaves a
statement. All runs of one kind of adapter share a model, so that its batches are compiled once.

Run: python -m reproductions.finetuning.compare MODEL rows/ --table tables/epsilon.json --json FILE
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from userdp.clipping.fast import FastClipping
from userdp.clipping.rules import AutomaticClip, FlatClip, NormalisedClip
from userdp.clipping.settings import StepSettings
from userdp.data.tokens import TokenRows
from userdp.evaluation import evaluate
from userdp.index import IGNORED_LABEL, Rows
from userdp.losses import Batch, causal_lm_loss
from userdp.models.load import Lora, add_lora, load_model
from userdp.plan import Plan
from userdp.streams import RunSecret
from userdp.units import Adjacency

NEVER_BINDS = 1e6
EVALUATION_TOKENS = 32_768


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run. `epsilon` None trains without noise and without clipping.

    `method` is "uls" (users are sampled) or "els" (records are sampled, at most `k` of a user).
    `k` records of a user take part, in a step or in the run. `rank` 0 trains all weights.
    `targets` are module names with + between them.
    """

    data: str
    method: str = "uls"
    epsilon: float | None = 8.0
    k: int = 4
    cohort: float = 256
    steps: int = 60
    rate: float | None = 1e-3
    rank: int = 4
    targets: str = "all-linear"
    clip: str = "flat"
    clip_norm: float = 1.0
    optimizer: str = "adam"
    warmup: float = 0.1
    seed: int = 0
    times_users: float = 1.0


def settings_of(table: dict[str, Any]) -> Iterator[Setting]:
    """The table's runs: lists are spread out, the last key fastest."""
    names = {field.name for field in fields(Setting)}
    for row in table["rows"]:
        given = {**table.get("defaults", {}), **row}
        assert given.keys() <= names, given.keys() - names
        lists = [value if isinstance(value, list) else [value] for value in given.values()]
        for values in itertools.product(*lists):
            yield Setting(**dict(zip(given, values, strict=True)))


@dataclass(frozen=True)
class Set:
    """A prepared set: rows of training users and of held-out ones."""

    train: TokenRows
    test: TokenRows
    end: int
    kept: dict[int, np.ndarray]

    @classmethod
    def read(cls, path: Path) -> Set:
        """The file that `prepare` wrote."""
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}

        def part(name: str) -> TokenRows:
            return TokenRows(
                tokens=arrays[f"{name}_tokens"].astype(np.int32),
                indptr=arrays[f"{name}_indptr"],
                owners=arrays[f"{name}_owners"],
                num_users=int(arrays[f"{name}_num_users"]),
            )

        kept = {
            int(name.removeprefix("train_kept_")): value
            for name, value in arrays.items()
            if name.startswith("train_kept_")
        }
        return cls(part("train"), part("test"), int(arrays["end"]), kept)

    @property
    def has_several_owners(self) -> bool:
        """Whether records have several owners: then greedy bounding chose which are kept."""
        return bool(self.kept)

    def rows(self, k: int) -> TokenRows:
        """The rows that may take part if each owner has at most `k` records."""
        if not self.has_several_owners:
            return self.train
        chosen = self.kept[k]
        starts, lengths = self.train.indptr[chosen], np.diff(self.train.indptr)[chosen]
        indptr = np.concatenate([[0], np.cumsum(lengths)])
        places = np.arange(indptr[-1]) + np.repeat(starts - indptr[:-1], lengths)
        return TokenRows(
            tokens=self.train.tokens[places],
            indptr=indptr,
            owners=np.arange(len(chosen)),
            num_users=len(chosen),
        )


def plan_of(setting: Setting, found: Set, rows: TokenRows) -> Plan:
    """The run's plan. Sizes of the sets are public here: they are in their README."""
    private = setting.epsilon is not None
    shared: dict[str, Any] = {
        "steps": setting.steps,
        "group_size": setting.k,
        "clip": clip_of(setting),
        "delta": found.train.num_users**-1.1,
        "epsilon": setting.epsilon,
        "noise_multiplier": None if private else 0.0,
        "non_private": not private,
    }
    if found.has_several_owners:
        return Plan.sample_records(
            num_users=found.train.num_users,
            num_records=len(rows),
            expected_batch_size=min(setting.cohort, len(rows)),
            adjacency=Adjacency.FIXED_GRAPH_ZERO_OUT,
            **shared,
        )
    users = round(rows.num_users * setting.times_users)
    if setting.method == "uls":
        plan = Plan.sample_users(
            num_users=users,
            expected_cohort_size=min(setting.cohort, rows.num_users) * setting.times_users,
            **shared,
        )
        return plan if setting.times_users == 1 else real_cohorts(plan, setting, rows.num_users)
    counts = np.minimum(np.bincount(rows.owners, minlength=rows.num_users), setting.k)
    kept = int(counts.sum())
    return Plan.sample_records(
        num_users=users,
        num_records=kept,
        expected_batch_size=min(setting.cohort, kept),
        **shared,
    )


def real_cohorts(plan: Plan, setting: Setting, users: int) -> Plan:
    """A plan of the real users whose mean update has the noise that the larger one would have.

    Hypothetical: it is what training on `times_users` as many users would be like, if all of them
    were like these. Its epsilon is that of the larger population.
    """
    cohort = min(setting.cohort, users)
    scaled = replace(plan.noise, noise_multiplier=plan.noise.noise_multiplier / setting.times_users)
    return replace(plan, noise=scaled, divisor=cohort, num_users=users)


def clip_of(setting: Setting) -> Any:
    """The clip rule; without privacy its norm is too large to bind."""
    if setting.clip == "automatic":
        return AutomaticClip()
    kinds = {"flat": FlatClip, "normalised": NormalisedClip}
    clip_norm = setting.clip_norm if setting.epsilon is not None else NEVER_BINDS
    return kinds[setting.clip](clip_norm=clip_norm)


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


def full_rows(rows: TokenRows, group: Rows, end: int, length: int) -> Batch:
    """The group's rows, all of one length, so that few batch shapes occur."""
    ids, labels = rows.padded(group, pad_token=end)
    wide = ((0, 0), (0, length - ids.shape[1]))
    return {
        "input_ids": torch.from_numpy(np.pad(ids, wide, constant_values=end)),
        "labels": torch.from_numpy(np.pad(labels, wide, constant_values=IGNORED_LABEL)),
    }


def run(setting: Setting, bench: Bench, found: Set, length: int) -> dict[str, Any]:
    """Train once from the public weights and measure on the held-out users."""
    began = time.perf_counter()
    bench.reset()
    rows = found.rows(setting.k)
    plan = plan_of(setting, found, rows)
    optimizer = optimizer_of(setting, bench.trained)
    warm = max(1, round(setting.warmup * setting.steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warm, (setting.steps - s) / (setting.steps - warm + 1))
    )
    secret = RunSecret.fixed_for_tests(setting.seed)
    index = plan.sampler.limit_contributions(rows.index(), secret.streams("limit contributions"))
    noise = plan.noise.started()
    for step in range(setting.steps):
        cohort = plan.sampler.draw(index, step, secret.streams("cohort"))
        groups = [full_rows(rows, group, found.end, length) for group in cohort]
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
    after = evaluate(bench.model, found.test, pad_token=found.end, batch_tokens=EVALUATION_TOKENS)
    return {
        **asdict(setting),
        "loss": after.loss,
        "accuracy_top1": after.accuracy_top1,
        "noise_multiplier": plan.noise.noise_multiplier,
        "divisor": plan.divisor,
        "users": plan.num_users,
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


def best_rate(done: list[dict[str, Any]], tune_on: str, epsilon: float | None) -> float:
    """The rate with the lowest loss on the set `tune_on`, at this epsilon if it was tried there."""
    tried = [row for row in done if row["data"] == tune_on]
    same = [row for row in tried if row["epsilon"] == epsilon]
    private = [row for row in tried if row["epsilon"] is not None]
    return min(same or private, key=lambda row: row["loss"])["used_rate"]


def main() -> None:
    """Run a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--gguf-file")
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--json", type=Path, help="a line for each run, as soon as it is done")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no run after these")
    parser.add_argument("--length", type=int, default=128, help="tokens a row, as prepared")
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    began = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base, _ = load_model(options.model, gguf_file=options.gguf_file, device=device)
    base.eval()
    table = json.loads(options.table.read_text())
    sets: dict[str, Set] = {}
    before: dict[str, float] = {}
    benches: dict[Any, Bench] = {}
    done = finished(options.json)
    keys = [field.name for field in fields(Setting)]
    known = [{name: row[name] for name in keys} for row in done]
    for setting in settings_of(table):
        if asdict(setting) in known:
            continue
        if time.perf_counter() - began > options.seconds:
            print(json.dumps({"left_out": asdict(setting)}), flush=True)
            continue
        name = setting.data
        if name not in sets:
            sets[name] = found = Set.read(options.rows / f"{name}.npz")
            first = evaluate(base, found.test, pad_token=found.end, batch_tokens=EVALUATION_TOKENS)
            before[name] = first.loss
        asked = setting
        if setting.rate is None:
            setting = replace(setting, rate=best_rate(done, table["tune_on"], setting.epsilon))
        kind = (setting.rank, setting.targets, setting.clip)
        if kind not in benches:
            benches[kind] = Bench(base, setting, length=options.length, compiled=options.compiled)
        row = run(setting, benches[kind], sets[name], options.length)
        done.append({**row, **asdict(asked), "used_rate": setting.rate})
        done[-1]["loss_before"] = before[name]
        line = json.dumps(done[-1])
        print(line, flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
