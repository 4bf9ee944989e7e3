"""Which of a user's rows are best to train on: the order of Chua et al. 2024, Tables 2, 4 and 7.

Every selection is trained from the same weights with the same settings, privately at one epsilon
and without noise, with several seeds. Perplexity is measured on users who were held out. The
numbers are about data that is public: perplexities of rows that are trained on are printed, too,
as in Table 7, and nothing covers those.

`arrays` cuts a store into rows and writes them as plain arrays. `run` needs nothing but those, so
it runs where Arrow, DuckDB and pydantic are not installed. It adds one line to its file for every
run that ends, and leaves out the runs that are in the file. `table` reads the file.

Run: python -m reproductions.finetuning.selections arrays STORE MODEL ROWS.npz --length 128
     python -m reproductions.finetuning.selections run ROWS.npz HELD_OUT.npz MODEL RUNS.jsonl
     python -m reproductions.finetuning.selections table RUNS.jsonl

Arrays: tokens, indptr, owners, record_of_row, num_users (`userdp.data.tokens.TokenRows`).
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from userdp.clipping.settings import StepSettings
from userdp.data.choose import Choice, Contributions, Select, contributions
from userdp.data.tokens import TokenRows
from userdp.evaluation import evaluate, mean_losses
from userdp.models.load import Lora, add_lora, load_model
from userdp.optimizers import make_optimizer, make_schedule
from userdp.plan import Plan
from userdp.sampling import PoissonUsers
from userdp.step import PrivateStep
from userdp.streams import RunSecret
from userdp.tasks import CausalTask, cohort_batches
from userdp.units import SamplingUnit

PAD = 0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all selections share. `num_users` is the public number; None takes the true one."""

    length: int = 128
    unit: str = "user"
    group_size: int = 10
    expected: float = 64.0
    steps: int = 200
    delta: float = 1e-5
    clip_norm: float = 1.0
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    schedule: str = "linear"
    lora_rank: int = 0
    resample: bool = False
    num_users: int | None = None


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One run. An infinite epsilon means no noise; updates are clipped all the same."""

    select: str
    epsilon: float
    seed: int


def read_rows(path: Path) -> TokenRows:
    """The rows that `arrays` wrote."""
    with np.load(path, allow_pickle=False) as arrays:
        return TokenRows(
            tokens=arrays["tokens"],
            indptr=arrays["indptr"],
            owners=arrays["owners"],
            num_users=int(arrays["num_users"]),
            records=arrays["record_of_row"],
        )


def write_rows(path: Path, rows: TokenRows) -> None:
    """Write rows as plain arrays."""
    assert rows.records is not None
    np.savez(
        path,
        tokens=rows.tokens,
        indptr=rows.indptr,
        owners=rows.owners,
        record_of_row=rows.records,
        num_users=rows.num_users,
    )


def record_losses(base: nn.Module, rows: TokenRows) -> np.ndarray:
    """The mean loss of each record under the public model."""
    assert rows.records is not None
    number = int(rows.records.max()) + 1
    return mean_losses(base, rows, rows.records, num_records=number, pad_token=PAD)


def chosen_rows(
    rows: TokenRows, losses: np.ndarray, select: str, settings: Settings, secret: RunSecret
) -> Contributions:
    """What users give under a selection. `losses` score records, for the perplexity criteria."""
    choice = Choice.of(select, resample=settings.resample)
    return contributions(
        rows,
        choice,
        unit=SamplingUnit(settings.unit),
        group_size=settings.group_size,
        sequence_length=settings.length,
        streams=secret.streams("choose rows"),
        losses=losses if choice.needs_losses else None,
    )


def plan_of(settings: Settings, epsilon: float, num_users: int) -> Plan:
    """The plan of one run."""
    shared: dict[str, Any] = {
        "num_users": settings.num_users or num_users,
        "group_size": settings.group_size,
        "steps": settings.steps,
        "clip_norm": settings.clip_norm,
        "delta": settings.delta,
    }
    shared |= (
        {"noise_multiplier": 0.0, "non_private": True}
        if math.isinf(epsilon)
        else {"epsilon": epsilon}
    )
    if settings.unit == "user":
        return Plan.sample_users(expected_cohort_size=settings.expected, **shared)
    return Plan.sample_records(expected_batch_size=settings.expected, **shared)


def train(
    base: nn.Module, chosen: Contributions, plan: Plan, settings: Settings, seed: int
) -> nn.Module:
    """A copy of the public model, trained on what users give."""
    secret = RunSecret.fixed_for_tests(seed)
    model = copy.deepcopy(base)
    torch.manual_seed(seed)
    if settings.lora_rank:
        model = add_lora(model, Lora(rank=settings.lora_rank, alpha=2.0 * settings.lora_rank))
    model.eval()
    on_cuda = next(model.parameters()).is_cuda
    optimizer = make_optimizer(model, settings.optimizer, settings.learning_rate)
    scheduler = make_schedule(optimizer, settings.schedule, settings.steps)
    task = CausalTask(pad_token=PAD)
    step = PrivateStep(
        model,
        optimizer,
        plan,
        chosen.index(),
        record_loss=task.record_loss,
        settings=StepSettings(compute_dtype=torch.bfloat16 if on_cuda else None),
        sequence_length=settings.length,
        secret=secret,
    )
    step.check_model()
    streams = step.record.streams("rows")
    for cohort in step.cohorts():
        number = step.record.steps
        step.apply(cohort_batches(chosen, cohort, task, step=number, streams=streams))
        if scheduler is not None:
            scheduler.step()
    return model


def describe(base: nn.Module, chosen: Contributions, settings: Settings) -> dict[str, float]:
    """Mean length, mean perplexity and share of short rows among what users give (Table 7)."""
    secret = RunSecret.fixed_for_tests(0)
    everybody = PoissonUsers(user_sampling_prob=1.0, group_size=settings.group_size)
    pieces: list[np.ndarray] = []
    owners: list[int] = []
    cohort = everybody.draw(chosen.index(), 0, secret.streams("cohort"))
    for user, group in enumerate(cohort):
        table, places = chosen.read(group, secret.streams("rows").rng(0, user + 1))
        for place in places.tolist():
            pieces.append(table.tokens[table.indptr[place] : table.indptr[place + 1]])
            owners.append(user)
    lengths = np.array([len(piece) for piece in pieces])
    given = TokenRows(
        tokens=np.concatenate(pieces),
        indptr=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        owners=np.array(owners, np.int64),
        num_users=chosen.index().num_users,
    )
    numbers = np.arange(len(given))
    losses = mean_losses(base, given, numbers, num_records=len(given), pad_token=PAD)
    return {
        "rows": len(given),
        "mean_length": float(lengths.mean()),
        "mean_perplexity": float(np.exp(losses).mean()),
        # A few short rows of rare tokens can decide the mean.
        "median_perplexity": float(np.exp(np.median(losses))),
        "share_below_length": float((lengths < settings.length).mean()),
    }


def table(runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """For each epsilon: the selections by mean perplexity, with their spread over the seeds.

    `rank` is the place of a selection among those with the same seed, 1 being the best. `to_random`
    is the difference to random rows with the same seed, and `better_than_random` says with how many
    of the seeds it was below zero. One seed's runs share their cohorts' coins and their noise.
    """
    found: dict[str, dict[int, dict[str, float]]] = {}
    for run in runs:
        by_seed = found.setdefault(_told(run["epsilon"]), {})
        by_seed.setdefault(run["seed"], {})[run["select"]] = run["perplexity"]
    return {epsilon: _order(by_seed) for epsilon, by_seed in found.items()}


def _order(by_seed: dict[int, dict[str, float]]) -> dict[str, Any]:
    selects = sorted({select for seed in by_seed.values() for select in seed})
    rows: dict[str, Any] = {}
    for select in selects:
        seeds = [seed for seed in by_seed.values() if select in seed]
        ranks = [1 + sum(other < seed[select] for other in seed.values()) for seed in seeds]
        gaps = [seed[select] - seed["random"] for seed in seeds if "random" in seed]
        rows[select] = {
            "perplexity": _spread([seed[select] for seed in seeds]),
            "rank": _spread([float(rank) for rank in ranks]),
            "to_random": _spread(gaps),
            "better_than_random": f"{sum(gap < 0 for gap in gaps)} of {len(gaps)}",
        }
    ordered = sorted(selects, key=lambda select: rows[select]["perplexity"]["mean"])
    return {"order": ordered, "selections": {select: rows[select] for select in ordered}}


def _spread(values: list[float]) -> dict[str, float | None]:
    """Mean, standard deviation over seeds, smallest and largest."""
    if not values:
        return {"mean": None, "stdev": None, "min": None, "max": None}
    stdev = statistics.stdev(values) if len(values) > 1 else None
    return {
        "mean": statistics.fmean(values),
        "stdev": stdev,
        "min": min(values),
        "max": max(values),
    }


def _told(epsilon: float | str) -> str:
    """An epsilon as JSON can hold it."""
    return f"{float(epsilon):g}"


def read_runs(path: Path) -> list[dict[str, Any]]:
    """The runs that have ended."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_all(
    base: nn.Module,
    rows: TokenRows,
    held_out: TokenRows,
    settings: Settings,
    arms: Iterable[Arm],
    path: Path,
) -> dict[str, Any]:
    """Train every arm that is not yet in the file; return the table of all that are in it then."""
    losses = record_losses(base, rows)
    shared = asdict(settings)
    done = read_runs(path)
    if any(run["settings"] != shared for run in done):
        raise SystemExit(f"{path} holds runs with other settings: give another file.")
    known = {(run["select"], run["epsilon"], run["seed"]) for run in done}
    plans: dict[float, Plan] = {}
    for arm in arms:
        if (arm.select, _told(arm.epsilon), arm.seed) in known:
            continue
        if arm.epsilon not in plans:
            plans[arm.epsilon] = plan_of(settings, arm.epsilon, rows.num_users)
        secret = RunSecret.fixed_for_tests(arm.seed)
        chosen = chosen_rows(rows, losses, arm.select, settings, secret)
        model = train(base, chosen, plans[arm.epsilon], settings, arm.seed)
        perplexity = evaluate(model, held_out, pad_token=PAD).perplexity
        told = asdict(arm) | {"epsilon": _told(arm.epsilon), "perplexity": perplexity}
        with path.open("a") as file:
            file.write(json.dumps(told | {"settings": shared}) + "\n")
        print(json.dumps(told), flush=True)
    return table(read_runs(path))


def main(arguments: list[str] | None = None) -> None:
    """Run a command of this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    arrays = commands.add_parser("arrays", help="cut a store into rows")
    arrays.add_argument("store", type=Path)
    arrays.add_argument("model")
    arrays.add_argument("out", type=Path)
    arrays.add_argument("--length", type=int, default=Settings.length)
    tables = commands.add_parser("table", help="the order of the selections so far")
    tables.add_argument("runs", type=Path)
    run = commands.add_parser("run", help="train all selections")
    run.add_argument("rows", type=Path)
    run.add_argument("held_out", type=Path)
    run.add_argument("model")
    run.add_argument("runs", type=Path)
    run.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    run.add_argument("--epsilons", type=float, nargs="+", default=[8.0, math.inf])
    run.add_argument("--seeds", type=int, default=3)
    run.add_argument("--selects", nargs="+", choices=list(Select), default=list(Select))
    run.add_argument("--unit", choices=["user", "record"], default=Settings.unit)
    run.add_argument("--resample", action="store_true")
    for name in ("length", "group_size", "steps", "lora_rank", "num_users"):
        option = f"--{name.replace('_', '-')}"
        run.add_argument(option, type=int, default=getattr(Settings, name))
    for name in ("expected", "delta", "clip_norm", "learning_rate"):
        option = f"--{name.replace('_', '-')}"
        run.add_argument(option, type=float, default=getattr(Settings, name))
    for name in ("optimizer", "schedule"):
        run.add_argument(f"--{name}", default=getattr(Settings, name))
    given = parser.parse_args(arguments)
    if given.command == "arrays":
        from userdp.data.store import UserStore
        from userdp.data.tokens import tokenise
        from userdp.models.load import load_tokenizer

        tokenizer = load_tokenizer(given.model)
        write_rows(
            given.out,
            tokenise(UserStore.open(given.store), tokenizer, sequence_length=given.length),
        )
        return
    if given.command == "table":
        print(json.dumps(table(read_runs(given.runs)), indent=2))
        return
    settings = Settings(**{name: getattr(given, name) for name in Settings.__dataclass_fields__})
    base, _ = load_model(given.model, device=given.device)
    rows, held_out = read_rows(given.rows), read_rows(given.held_out)
    # All selections of a seed before the next seed, so that what is there can be compared.
    arms = [
        Arm(select=select, epsilon=epsilon, seed=seed)
        for seed in range(given.seeds)
        for epsilon in given.epsilons
        for select in given.selects
    ]
    before = evaluate(base, held_out, pad_token=PAD).perplexity
    losses = record_losses(base, rows)
    described: dict[str, Any] = {}
    for name in given.selects:
        chosen = chosen_rows(rows, losses, name, settings, RunSecret.fixed_for_tests(0))
        described[name] = describe(base, chosen, settings)
    result = {
        "perplexity_before": before,
        "given": described,
        "epsilons": run_all(base, rows, held_out, settings, arms, given.runs),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
