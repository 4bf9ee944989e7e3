"""The loop over a store, from Python: ten lines from a store to a statement."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import userdp
from userdp.streams import RunSecret


@pytest.mark.parametrize("unit", ["users", "records"])
def test_ten_line_api(unit: str, base_model: Path, train_store: Path, tmp_path: Path) -> None:
    store = userdp.UserStore.open(train_store)
    public = {"num_users": 20, "group_size": 2, "steps": 3, "clip_norm": 1.0, "delta": 1e-2}
    plan = (
        userdp.Plan.sample_users(expected_cohort_size=5, epsilon=8.0, **public)
        if unit == "users"
        else userdp.Plan.sample_records(expected_batch_size=5, noise_multiplier=4.0, **public)
    )
    model, tokenizer = userdp.load_model(base_model, lora=userdp.Lora(rank=2))
    done: list[int] = []
    run = userdp.train(
        model,
        tokenizer,
        store,
        plan,
        sequence_length=16,
        out=tmp_path / "run",
        on_step=done.append,
    )
    assert done == [1, 2, 3]
    assert run.statement.epsilon == plan.epsilon()
    assert userdp.Ledger.read(tmp_path / "run" / "ledger.jsonl").steps == 3
    assert (tmp_path / "run" / "model" / "adapter_model.safetensors").is_file()


def test_golden_run_is_reproduced_with_a_fixed_seed(base_model: Path, train_store: Path) -> None:
    def weights() -> torch.Tensor:
        plan = userdp.Plan.sample_users(
            num_users=20,
            expected_cohort_size=5,
            group_size=2,
            steps=3,
            clip_norm=1.0,
            noise_multiplier=1.0,
            delta=1e-2,
        )
        model, tokenizer = userdp.load_model(base_model)
        userdp.train(
            model,
            tokenizer,
            userdp.UserStore.open(train_store),
            plan,
            sequence_length=16,
            secret=RunSecret.fixed_for_tests(3),
        )
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(), weights())


def test_scheduler_is_stepped_once_a_step(base_model: Path, train_store: Path) -> None:
    plan = userdp.Plan.sample_users(
        num_users=20,
        expected_cohort_size=2,
        group_size=1,
        steps=3,
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-2,
    )
    model, tokenizer = userdp.load_model(base_model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    userdp.train(
        model,
        tokenizer,
        userdp.UserStore.open(train_store),
        plan,
        optimizer=optimizer,
        scheduler=scheduler,
        sequence_length=16,
    )
    assert scheduler.get_last_lr() == [pytest.approx(1e-3)]


def test_run_is_refused_where_another_ledger_lies(
    base_model: Path, train_store: Path, tmp_path: Path
) -> None:
    plan = userdp.Plan.sample_users(
        num_users=20,
        expected_cohort_size=2,
        group_size=1,
        steps=1,
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-2,
    )
    store = userdp.UserStore.open(train_store)
    for attempt in range(2):
        model, tokenizer = userdp.load_model(base_model)
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        if attempt == 0:
            userdp.train(model, tokenizer, store, plan, sequence_length=16, out=tmp_path)
        else:
            with pytest.raises(userdp.InputError, match="already holds a run"):
                userdp.train(model, tokenizer, store, plan, sequence_length=16, out=tmp_path)
            after = torch.cat([p.detach().flatten() for p in model.parameters()])
            assert torch.equal(before, after)
