"""The plan of a trainer: the one that is given, or the library's defaults where nothing is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import PRIVACY, USERS, texts

import userdp
import userdp.defaults
from userdp import InputError, Plan, StepSettings, UserDPTrainer, UserStore
from userdp.clipping.fast import FastClipping
from userdp.losses import causal_lm_loss
from userdp.prices.marks import Hypothetical
from userdp.runs.check import check_run
from userdp.units import Adjacency

pytest.importorskip("accelerate", reason="TrainingArguments needs accelerate")

NOTHING: dict[str, Any] = {"per_device_train_batch_size": None, "learning_rate": None}


def test_what_is_not_given_is_chosen_from_public_numbers(
    make: Callable[..., UserDPTrainer], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(num_users=5000, arguments=NOTHING)
    expected = Plan.sample_users(num_users=5000, epsilon=8.0, steps=4)
    assert trainer.plan == expected
    assert trainer.optimizer.defaults["lr"] == userdp.defaults.learning_rate(
        adapters=False, width=16
    )
    assert "250 users a step" in caplog.text
    assert "learning_rate has the default of TrainingArguments" in caplog.text
    assert "below 32" not in caplog.text


def test_what_is_given_is_kept(make: Callable[..., UserDPTrainer]) -> None:
    trainer = make(arguments={"per_device_train_batch_size": None, "learning_rate": 0.02})
    assert trainer.optimizer.defaults["lr"] == 0.02
    trainer = make(arguments={"gradient_accumulation_steps": 3})
    assert trainer.plan.divisor == 18
    assert make(expected_cohort_size=12.0).plan.divisor == 12
    sgd = make(arguments={"optim": "sgd", "learning_rate": None})
    assert sgd.optimizer.defaults["lr"] == sgd.args.learning_rate


def test_a_small_cohort_is_said_in_the_log(
    make: Callable[..., UserDPTrainer], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        make()
        assert "6 users are expected in a step: below 32" in caplog.text
        caplog.clear()
        make(num_users=1000, arguments={"per_device_train_batch_size": 32})
        assert "below 32" not in caplog.text


def test_a_whole_plan_takes_the_place_of_its_parts(
    make: Callable[..., UserDPTrainer], tmp_path: Path
) -> None:
    plan = Plan.sample_users(
        num_users=USERS, expected_cohort_size=6, steps=3, noise_multiplier=2.0, clip_norm=0.5
    )
    none: dict[str, Any] = {"epsilon": None, "num_users": None}
    free = {"per_device_train_batch_size": None, "max_steps": None}
    trainer = make(plan=plan, **none, arguments=free)
    assert trainer.plan is plan
    assert trainer.train().global_step == 3
    assert check_run(tmp_path / "out" / "userdp" / "run").ok
    for name, value in {**PRIVACY, "clip_norm": 1.0, "delta": 1e-6, "group_size": 2}.items():
        with pytest.raises(InputError, match=f"^{name}=.* beside plan="):
            make(plan=plan, **{**none, name: value}, arguments=free)
    for name, value in {"max_steps": 4, "num_train_epochs": 2.0}.items():
        with pytest.raises(InputError, match=rf"\({name}=.*beside plan=, which has 3 steps"):
            make(plan=plan, **none, arguments={**free, name: value})
    with pytest.raises(InputError, match="which has 6 groups a step"):
        make(plan=plan, **none, arguments={"max_steps": 3})
    with pytest.raises(InputError, match="num_users is missing: give epsilon and num_users"):
        make(num_users=None)


@pytest.mark.parametrize(
    "plan",
    [
        Plan.sample_records(
            num_users=USERS, expected_batch_size=6, group_size=2, steps=2, noise_multiplier=1.0
        ),
        Plan.sample_users(
            num_users=USERS, expected_cohort_size=6, steps=2, noise_multiplier=1.0, non_private=True
        ),
        Plan.sample_users(
            num_users=USERS,
            expected_cohort_size=6,
            steps=2,
            epsilon=8.0,
            mark=Hypothetical(num_users=2 * USERS, expected_groups=12),
        ),
    ],
    ids=["records", "non-private", "hypothetical"],
)
def test_plans_of_every_kind_train_and_only_a_promise_is_logged(
    make: Callable[..., UserDPTrainer], plan: Plan
) -> None:
    free = {"per_device_train_batch_size": None, "max_steps": None}
    trainer = make(plan=plan, epsilon=None, num_users=None, arguments=free)
    done = trainer.train()
    assert ("epsilon" in done.metrics) == trainer.statement.guarantee
    assert any("epsilon" in e for e in trainer.state.log_history) == trainer.statement.guarantee


def test_choices_of_rows_averages_and_losses_are_those_of_train(
    make: Callable[..., UserDPTrainer],
) -> None:
    def record_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return 2 * causal_lm_loss(model, batch)

    trainer = make(select="longest", ema=0.5, record_loss=record_loss)
    trainer.train()
    assert trainer.run is not None
    bound_to = trainer.run.ledger.bound_to
    assert bound_to["select"].startswith("longest")
    assert bound_to["ema"] == "0.5"
    assert "record_loss" in bound_to["task"]
    with pytest.raises(InputError, match=r"ema=0\.5 with eval_strategy or eval_on_start"):
        make(
            ema=0.5,
            eval_dataset=texts(3, prefix="other"),
            arguments={"eval_strategy": "steps", "eval_steps": 1},
        )
    with pytest.raises(InputError, match="give record_loss=, a function"):
        make(compute_loss_func=record_loss)


def test_records_of_several_owners_train_with_a_selection(
    make: Callable[..., UserDPTrainer], tmp_path: Path
) -> None:
    rows = [
        {**row, "user_id": [row["user_id"], f"u{n % USERS}x"]} for n, row in enumerate(texts(9))
    ]
    store = UserStore.from_dataset(rows, tmp_path / "people")
    bounded = userdp.bound(store.path, 2).selection
    plan = Plan.sample_records(
        num_users=100,
        expected_batch_size=6,
        group_size=2,
        steps=2,
        noise_multiplier=1.0,
        adjacency=Adjacency.FIXED_GRAPH_ZERO_OUT,
    )
    given: dict[str, Any] = {
        "train_dataset": store,
        "plan": plan,
        "epsilon": None,
        "num_users": None,
        "arguments": {"per_device_train_batch_size": None, "max_steps": None},
    }
    with pytest.raises(InputError, match="selection"):
        make(**given).train()
    trainer = make(selection=bounded, **given)
    trainer.train(resume_from_checkpoint=False)
    assert trainer.statement.guarantee


def test_settings_of_the_step_reach_the_run(
    make: Callable[..., UserDPTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_fast_path(*_: Any, **__: Any) -> None:
        raise AssertionError("many users in one backward pass")

    trainer = make(settings=StepSettings(path="plain", microbatch_records=1))
    monkeypatch.setattr(FastClipping, "__init__", no_fast_path)
    trainer.train()
    assert trainer.statement.guarantee


def test_settings_that_the_arguments_contradict_are_refused(
    make: Callable[..., UserDPTrainer],
) -> None:
    arguments = {"full_determinism": True}
    with pytest.raises(InputError, match="full_determinism=True beside settings= with determini"):
        make(settings=StepSettings(), arguments=arguments)
    make(settings=StepSettings(deterministic=True), arguments=arguments)
    with pytest.raises(InputError, match=r"shard=True.*userdp\.train"):
        make(settings=StepSettings(shard=True))
