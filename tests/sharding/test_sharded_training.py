"""`train` with shards: the run of one process, checkpoints by shards, resumed on other ranks."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from sharded_runs import furthest, run_ranks
from userdp import Plan, StepSettings, train
from userdp.files.interrupts import InterruptedRunError
from userdp.runs.checkpoints import Saving
from userdp.streams import RunSecret
from userdp.updates.contract import UpdateRule
from userdp.updates.fedavg import FedAvg
from userdp.updates.mean_gradient import MEAN_GRADIENT

LOCAL = FedAvg(local_learning_rate=0.3, local_batch_size=1, user_weight_cap=2.0)
SAME = 1e-6
STEPS = 6


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of `train`; `stop` ends it by an interrupt after so many steps."""

    data: Path
    out: Path
    shard: bool = True
    resume: bool = False
    stop: int | None = None
    ema: float | None = None
    update: UpdateRule = MEAN_GRADIENT
    lora: bool = False


def run(given: Run) -> None:
    """Train on this rank."""
    import os
    import signal

    from peft import LoraConfig, get_peft_model
    from transformers import AutoTokenizer, GPT2LMHeadModel

    from userdp.data.store import UserStore

    model: Any = GPT2LMHeadModel.from_pretrained(given.data / "model").eval()
    if given.lora:
        torch.manual_seed(4)
        model = get_peft_model(
            model, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        )
    tokenizer = AutoTokenizer.from_pretrained(given.data / "model")
    store = UserStore.open(given.data / "store")

    def on_step(steps: int) -> None:
        if steps == given.stop:
            os.kill(os.getpid(), signal.SIGTERM)

    plan = Plan.sample_users(
        num_users=8,
        expected_cohort_size=4,
        group_size=2,
        steps=STEPS,
        clip_norm=0.5,
        epsilon=20.0,
        delta=1e-2,
        update=given.update,
    )
    with contextlib.suppress(InterruptedRunError):
        train(
            model,
            tokenizer,
            store,
            plan,
            learning_rate=1e-2,
            sequence_length=12,
            settings=StepSettings(shard=given.shard, check=given.update is not MEAN_GRADIENT),
            out=given.out,
            saving=Saving(every_steps=2),
            resume=given.resume,
            ema=given.ema,
            secret=RunSecret.fixed_for_tests(9),
            on_step=on_step,
        )


def left_by(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    (saved,) = (path / "model").glob("*model.safetensors")
    return load_file(saved)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sharded")
    tiny.make_store(place / "store", [2, 1, 3, 2, 1, 2, 3, 1])
    tiny.make_model(place / "model", width=8)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sharded_run_leaves_the_model_of_one_process(
    data: Path, tmp_path: Path, ranks: int
) -> None:
    one = Run(data=data, out=tmp_path / "one", shard=False, ema=0.9)
    run(one)
    sharded = replace(one, out=tmp_path / "sharded", shard=True)
    run_ranks(ranks, run, sharded)
    assert furthest(left_by(sharded.out), left_by(one.out)) <= SAME
    newest = max((sharded.out / "checkpoints").glob("step-*"))
    assert len(list(newest.glob("shard-*.safetensors"))) == ranks
    assert not list(newest.glob("*.distcp")), "nothing is pickled"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"), [(2, 2), (4, 2), (2, 4), (2, 1), (1, 2)], ids=lambda n: str(n)
)
def test_a_sharded_run_goes_on_with_another_number_of_ranks(
    data: Path, tmp_path: Path, first: int, then: int
) -> None:
    whole = Run(data=data, out=tmp_path / "whole", shard=False)
    run(whole)
    stopped = replace(whole, out=tmp_path / "run", shard=True, stop=4)
    for ranks, part in ((first, stopped), (then, replace(stopped, resume=True, stop=None))):
        run_ranks(ranks, run, part)
    assert furthest(left_by(stopped.out), left_by(whole.out)) <= SAME


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False])
def test_sharded_local_training_goes_on_with_another_number_of_ranks(
    data: Path, tmp_path: Path, lora: bool
) -> None:
    whole = Run(data=data, out=tmp_path / "whole", shard=False, update=LOCAL, lora=lora, ema=0.9)
    run(whole)
    stopped = replace(whole, out=tmp_path / "run", shard=True, stop=4)
    for ranks, part in ((2, stopped), (4, replace(stopped, resume=True, stop=None))):
        run_ranks(ranks, run, part)
    assert furthest(left_by(stopped.out), left_by(whole.out)) <= SAME
