"""Whole runs on several ranks: a tiny model, a small store, and every kind of step."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import userdp
from userdp import Lora, Plan, load_model
from userdp.clipping.rules import AdaptiveClip, FlatClip
from userdp.data.store import UserStore
from userdp.digests.of_runs import trained_digest
from userdp.noise import Banded
from userdp.optimizers.by_name import make_optimizer, make_schedule
from userdp.ranks import Ranks
from userdp.runs.checkpoints import Saving
from userdp.sampling import CyclicPoissonUsers, PublicNumbers
from userdp.streams import RunSecret
from userdp.training.loop import Run
from userdp.updates.fedavg import FedAvg

USERS = 24
RECORDS = [1, 2, 3, 4, 2, 5] * 4


def users_plan(steps: int, **changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "num_users": USERS,
        "expected_cohort_size": 8,
        "group_size": 3,
        "steps": steps,
        "clip_norm": 0.5,
        "noise_multiplier": 1.0,
        "delta": 1e-2,
    }
    return Plan.sample_users(**(settings | changes))


def records_plan(steps: int) -> Plan:
    return Plan.sample_records(
        num_users=USERS,
        expected_batch_size=12,
        group_size=3,
        steps=steps,
        clip_norm=0.5,
        noise_multiplier=1.0,
        delta=1e-2,
    )


def banded_plan(steps: int) -> Plan:
    public = PublicNumbers(
        num_users=USERS,
        num_records=USERS * 3,
        expected_groups=6,
        group_size=3,
        steps=steps,
    )
    return Plan.of(
        CyclicPoissonUsers,
        public,
        own={"parts": 4},
        clip=FlatClip(clip_norm=0.5),
        noise=Banded(noise_multiplier=0.0, steps=steps, bands=4, strategy="toeplitz"),
        noise_multiplier=1.0,
        delta=1e-2,
    )


def adaptive_plan(steps: int) -> Plan:
    clip = AdaptiveClip(clip_norm=0.1, learning_rate=0.5, count_noise=5.0)
    return users_plan(steps, clip=clip, clip_norm=None)


def fedavg_plan(steps: int) -> Plan:
    update = FedAvg(local_learning_rate=0.5, local_batch_size=1, user_weight_cap=2.0)
    return users_plan(steps, update=update)


def clipped_average_plan(steps: int) -> Plan:
    return users_plan(
        steps, update=FedAvg(local_learning_rate=0.5, estimator="f_c", min_weight=20.0)
    )


# Name -> the plan of so many steps, and the adapters if there are any.
CASES: dict[str, tuple[Callable[[int], Plan], Lora | None]] = {
    "users": (users_plan, None),
    "users, LoRA": (users_plan, Lora(rank=2)),
    "records": (records_plan, None),
    "records, LoRA": (records_plan, Lora(rank=2)),
    "fedavg": (fedavg_plan, None),
    "f_c": (clipped_average_plan, Lora(rank=2)),
    "banded": (banded_plan, None),
    "adaptive": (adaptive_plan, Lora(rank=2)),
}


class Stopped(Exception):
    """The test stops the run here, as a kill would."""


def store_of(root: Path, out: Path) -> UserStore:
    """A copy of the store for one run, with a budget of its own."""
    own = out.parent / f"{out.name}-store"
    if not own.exists():
        shutil.copytree(root / "store", own)
    return UserStore.open(own)


def run(
    root: Path,
    out: Path,
    case: str = "users",
    *,
    steps: int = 6,
    seed: int | None = 3,
    every: int | None = 2,
    stop_after: int | None = None,
    signal_after: int | None = None,
    path: str = "fast",
    **options: Any,
) -> Run:
    """One run, called on every rank. The store of `out` must be there before (`prepared`)."""
    make_plan, lora = CASES[case]
    # Adapters are drawn differently on every rank, and those of the first count.
    torch.manual_seed(7 + Ranks.found().rank)
    model, tokenizer = load_model(root / "base", lora=lora)
    plan = make_plan(steps)
    optimizer = make_optimizer(model, "adamw", 0.01)

    def on_step(done: int) -> None:
        if done == stop_after:
            raise Stopped
        # One rank is told to stop, and all of them must.
        if done == signal_after and Ranks.found().rank == Ranks.found().count - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    return userdp.train(
        model,
        tokenizer,
        store_of(root, out),
        plan,
        optimizer=optimizer,
        scheduler=make_schedule(optimizer, "linear", plan.steps),
        sequence_length=16,
        settings=userdp.StepSettings(path=path),  # type: ignore[arg-type]
        out=out,
        secret=None if seed is None else RunSecret.fixed_for_tests(seed),
        saving=Saving(every_steps=every),
        on_step=on_step,
        **options,
    )


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a rank has at the end of a run."""

    weights: dict[str, torch.Tensor]
    digest: str
    head: str
    steps: int
    epsilon: float

    @staticmethod
    def of(run: Run) -> Seen:
        return Seen(
            weights={n: p.detach().clone() for n, p in run.model.named_parameters()},
            digest=trained_digest(run.model),
            head=run.ledger.head,
            steps=run.ledger.steps,
            epsilon=run.statement.epsilon,
        )


def rows(out: Path) -> list[dict[str, Any]]:
    """The rows of a run's ledger."""
    return [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]


def distance(one: Seen, other: Seen) -> float:
    """How far the weights are apart, relative to their size."""
    apart = sum(
        float((one.weights[n] - t).double().square().sum()) for n, t in other.weights.items()
    )
    size = sum(float(t.double().square().sum()) for t in other.weights.values())
    return (apart / size) ** 0.5
