"""Every argument of a Trainer has its place: used, without effect, or refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tiny import make_model
from userdp.errors import InputError
from userdp.trainer import arguments, settings
from userdp.trainer.arguments import HARMLESS, MAPPED, REFUSED, check_arguments

pytest.importorskip("accelerate", reason="TrainingArguments needs accelerate")


def training_arguments(**changed: Any) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(output_dir="out", use_cpu=True, **changed)


def fields_of(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def test_every_argument_of_the_installed_transformers_is_in_one_table() -> None:
    names = fields_of(transformers.TrainingArguments)
    tables = (MAPPED, HARMLESS, REFUSED)
    assert {name: sum(name in table for table in tables) for name in names} == dict.fromkeys(
        names, 1
    )


def test_every_argument_of_the_installed_trl_is_in_one_table() -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    missing = set(fields_of(trl.SFTConfig)) - MAPPED.keys() - HARMLESS.keys() - REFUSED.keys()
    assert not missing
    check_arguments(trl.SFTConfig(output_dir="out", use_cpu=True))
    with pytest.raises(InputError, match=r"SFTConfig\(packing=True\): it joins records of several"):
        check_arguments(trl.SFTConfig(output_dir="out", use_cpu=True, packing=True))


@pytest.mark.parametrize("name", fields_of(transformers.TrainingArguments))
def test_a_changed_argument_is_used_or_harmless_or_refused_by_its_name(name: str) -> None:
    args = training_arguments()
    check_arguments(args)
    if name != "output_dir":
        setattr(args, name, "something else")
    if name in REFUSED:
        with pytest.raises(InputError, match=rf"{name}='something else'\): \w+") as refused:
            check_arguments(args)
        assert REFUSED[name] in str(refused.value)
    else:
        check_arguments(args)


@dataclasses.dataclass
class Later(transformers.TrainingArguments):
    mixes_users: bool = False


Later.__module__ = "transformers.later"


@dataclasses.dataclass
class Scripts(transformers.TrainingArguments):
    """As scripts make them: a field of their own, another default, and one that must be given."""

    learning_rate: float = 0.5
    cache: str | None = None
    script: str = dataclasses.field(kw_only=True)


def test_what_a_scripts_own_class_adds_is_its_own() -> None:
    args = Scripts(output_dir="out", use_cpu=True, cache="c", script="s")
    assert check_arguments(args) == {"learning_rate": 0.5}
    with pytest.raises(InputError, match=r"TrainingArguments\(max_grad_norm=0.5\)"):
        check_arguments(Scripts(output_dir="out", use_cpu=True, script="s", max_grad_norm=0.5))
    with pytest.raises(InputError, match="args is a dict: give a"):
        check_arguments({"output_dir": "out"})


def test_an_argument_that_nobody_knows_is_refused_by_its_name() -> None:
    check_arguments(Later(output_dir="out", use_cpu=True))
    with pytest.raises(InputError, match=r"Later\(mixes_users=True\): .* does not know it"):
        check_arguments(Later(output_dir="out", use_cpu=True, mixes_users=True))


def test_saving_the_best_model_only_is_refused() -> None:
    args = training_arguments(save_strategy="best", eval_strategy="steps", eval_steps=1)
    with pytest.raises(InputError, match="save_strategy='best'"):
        check_arguments(args)


def test_each_reason_is_a_sentence_without_its_full_stop() -> None:
    for reason in (*MAPPED.values(), *HARMLESS.values(), *REFUSED.values()):
        assert reason
        assert not reason.endswith(".")
    assert arguments.__doc__


def test_epochs_become_steps_by_public_numbers() -> None:
    args = training_arguments(
        per_device_train_batch_size=8, gradient_accumulation_steps=4, num_train_epochs=2
    )
    cohort = settings.cohort_of(args, None)
    assert cohort == 32
    assert settings.cohort_of(args, 50.0) == 50
    # 2 * 1000 / 32 = 62.5
    assert settings.steps_of(args, 1000, cohort) == 63
    assert settings.steps_of(training_arguments(max_steps=7), 1000, cohort) == 7
    with pytest.raises(InputError, match="num_train_epochs=0 without max_steps"):
        settings.steps_of(training_arguments(num_train_epochs=0), 1000, cohort)


def rates(args: Any, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    schedule = settings.schedule_of(args, optimizer, steps)
    found: list[float] = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_schedules_warm_up_and_decay() -> None:
    ramp = [0.0, 0.5, 1.0]
    given: dict[str, Any] = {"learning_rate": 1.0, "warmup_steps": 2}
    linear = rates(training_arguments(**given), 6)
    assert linear == pytest.approx([*ramp, 0.75, 0.5, 0.25])
    cosine = rates(training_arguments(lr_scheduler_type="cosine", **given), 6)
    assert cosine == pytest.approx([*ramp, 0.853553, 0.5, 0.146447], abs=1e-6)
    flat = rates(training_arguments(lr_scheduler_type="constant_with_warmup", **given), 6)
    assert flat == pytest.approx([*ramp, 1.0, 1.0, 1.0])
    share = rates(training_arguments(learning_rate=1.0, warmup_steps=0.3), 6)
    assert share == pytest.approx(linear)
    with pytest.raises(InputError, match="lr_scheduler_type='reduce_lr_on_plateau' is not offered"):
        rates(
            training_arguments(lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch"), 6
        )


def test_optimizers_by_name_and_norms_that_do_not_decay(tmp_path: Path) -> None:
    model, _ = make_model(tmp_path / "model")
    args = training_arguments(weight_decay=0.1, adam_beta2=0.95, learning_rate=0.01)
    adamw = settings.optimizer_of(args, model, 0.01)
    assert isinstance(adamw, torch.optim.AdamW)
    assert adamw.defaults["betas"] == (0.9, 0.95)
    decaying, others = adamw.param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {p.ndim for p in decaying["params"]} == {2}
    assert {p.ndim for p in others["params"]} == {1}
    assert len(decaying["params"]) + len(others["params"]) == len(list(model.parameters()))
    kinds = {"adafactor": "Adafactor", "sgd": "SGD", "rmsprop": "RMSprop", "adagrad": "Adagrad"}
    for name, kind in kinds.items():
        found = settings.optimizer_of(training_arguments(optim=name), model, 0.01)
        assert type(found).__name__ == kind
    with pytest.raises(InputError, match="optim='adamw_bnb_8bit' is not offered"):
        settings.optimizer_of(training_arguments(optim="adamw_bnb_8bit"), model, 0.01)


def test_every_process_of_a_machine_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    args = training_arguments()
    assert settings.device_of(args).type == "cpu"
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(args, "use_cpu", False)
    assert settings.device_of(args) == torch.device("cuda", 1)
