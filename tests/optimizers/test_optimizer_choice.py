"""An optimizer and a schedule have the names and the checks of a configuration in Python, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import models_zoo
import userdp
from userdp.config.file import load_config
from userdp.digests.of_runs import code_digest, optimizer_digest
from userdp.errors import InputError
from userdp.optimizers.by_name import check_optimizer, check_schedule, optimizer_of, schedule_of
from userdp.optimizers.choice import optimizer_and_schedule


def test_words_in_python_make_what_they_make_in_a_configuration(
    config_file: Callable[..., Path],
) -> None:
    path = config_file(
        training='optimizer = "sgd"\nweight_decay = 0.25\nwarmup_steps = 1\n'
        'schedule = "cosine"\nschedule_hold = 0.5\noptimizer_options = {momentum = 0.5}'
    )
    settings = load_config(path).training
    model = models_zoo.build("gpt2 + lora")
    theirs = optimizer_of(model, settings)
    made, schedule = optimizer_and_schedule(
        model,
        settings.steps,
        optimizer="sgd",
        scheduler=None,
        learning_rate=0.01,
        weight_decay=0.25,
        optimizer_options={"momentum": 0.5},
        schedule="cosine",
        warmup_steps=1,
        schedule_hold=0.5,
    )
    assert code_digest(schedule) == code_digest(schedule_of(theirs, settings))
    assert optimizer_digest(made) == optimizer_digest(theirs)


def test_a_run_from_python_takes_the_names(
    base_model: Path, train_store: Path, tmp_path: Path
) -> None:
    plan = userdp.Plan.sample_users(
        num_users=20, expected_cohort_size=2, steps=2, noise_multiplier=1.0, delta=1e-2
    )
    model, tokenizer = userdp.load_model(base_model, lora=userdp.Lora(rank=2))
    userdp.train(
        model,
        tokenizer,
        userdp.UserStore.open(train_store),
        plan,
        optimizer="sgd",
        learning_rate=0.1,
        optimizer_options={"momentum": 0.5},
        schedule="cosine",
        warmup_steps=1,
        sequence_length=16,
        out=tmp_path / "run",
    )
    told = json.loads((tmp_path / "run" / "run.json").read_text())
    assert told["optimizer"] == "SGD"
    assert told["schedule"] == "cosine"


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)


def steps_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)


def test_an_optimizer_of_ones_own_takes_a_schedule_by_name_and_has_none_otherwise() -> None:
    own = sgd()
    assert optimizer_and_schedule(nn.Linear(1, 1), 4, optimizer=own, scheduler=None) == (own, None)
    _, schedule = optimizer_and_schedule(
        nn.Linear(1, 1), 4, optimizer=own, scheduler=None, schedule="linear", warmup_steps=1
    )
    assert own.param_groups[0]["lr"] == 0.5
    assert schedule.optimizer is own


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": "adamv"}, "optimizer = 'adamv' is not known; did you mean"),
        ({"optimizer": "lbfgs"}, "cannot be used"),
        ({"schedule": "wave"}, "schedule = 'wave': Input should be"),
        ({"learning_rate": -1.0}, "learning_rate = -1.0: Input should be greater than 0"),
        ({"warmup_steps": 4, "learning_rate": 1.0}, "fewer than there are"),
        ({"scheduler": "cosine"}, "schedule='cosine'"),
        ({"optimizer": sgd(), "learning_rate": 0.1}, "learning_rate beside optimizer=<SGD>"),
        ({"optimizer": sgd(), "warmup_steps": 1}, "name the schedule"),
        ({"scheduler": steps_of(sgd())}, "StepLR of an optimizer that is not given"),
        (
            {"optimizer": sgd(), "scheduler": steps_of(sgd()), "schedule": "linear"},
            "schedule beside scheduler=<StepLR>",
        ),
    ],
)
def test_contradictions_and_unknown_names_are_refused_in_one_line(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        optimizer_and_schedule(
            nn.Linear(1, 1), 4, **({"optimizer": None, "scheduler": None} | given)
        )
    assert "\n" not in str(caught.value)
    assert "Value error" not in str(caught.value)


def test_what_cannot_take_a_private_step_is_refused() -> None:
    model = torch.nn.Linear(2, 1)
    own, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    for wrong in (torch.optim.LBFGS(model.parameters()), torch.optim.SGD):
        with pytest.raises(InputError, match=r"computes the loss again|is no optimizer"):
            check_optimizer(wrong)
    check_optimizer(own)
    schedule = torch.optim.lr_scheduler.LambdaLR(other, lambda step: 1.0)
    with pytest.raises(InputError, match="schedule of another optimizer"):
        check_schedule(schedule, own)
    check_schedule(schedule, other)
