"""A trainer starts a run as it was made: nothing changes it behind its back or the price's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from tiny_llama import texts

from userdp import InputError, UserDPTrainer

pytest.importorskip("accelerate", reason="TrainingArguments needs accelerate")


def content(out: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_a_finished_run_takes_no_further_step_and_is_left_as_it_is(
    make: Callable[..., UserDPTrainer], tmp_path: Path
) -> None:
    make(arguments={"save_steps": 2}).train()
    before = content(tmp_path / "out")
    longer = make(arguments={"save_steps": 2, "max_steps": 6, "save_total_limit": 1})
    with pytest.raises(InputError, match="taken all of its 4 steps, and 6 are planned: train on"):
        longer.train(resume_from_checkpoint=True)
    assert content(tmp_path / "out") == before
    further = make(
        str(tmp_path / "out"), epsilon=16.0, arguments={"output_dir": str(tmp_path / "further")}
    )
    assert further.train().metrics["epsilon"] <= 16.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"epsilon": 1.0}, "privacy settings"),
        ({"arguments": {"learning_rate": 0.2}}, "learning rate"),
        ({"group_size": 1}, "privacy settings"),
        ({"arguments": {"max_steps": 2}}, "number of steps"),
    ],
)
def test_a_finished_run_is_given_only_for_what_it_began_with(
    make: Callable[..., UserDPTrainer], changes: dict[str, Any], named: str
) -> None:
    first = make()
    first.train()
    with pytest.raises(InputError, match=f"is finished, and it was begun with another .*{named}"):
        make(**changes).train(resume_from_checkpoint=True)
    again = make()
    assert again.train(resume_from_checkpoint=True).metrics["epsilon"] == first.statement.epsilon
    for weight, other in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(weight, other)


def test_a_plan_counts_what_was_spent_after_it_was_made(
    make: Callable[..., UserDPTrainer], llama: str, tmp_path: Path
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    one = make(model)
    other = make(model, arguments={"output_dir": str(tmp_path / "other")})
    one.train()
    for trainer in (other, one):
        with pytest.raises(InputError, match="make the trainer anew"):
            trainer.train()
    assert not (tmp_path / "other" / "userdp" / "run").exists()


def test_nothing_is_paid_for_weights_that_the_optimizer_does_not_train(
    make: Callable[..., UserDPTrainer], tmp_path: Path
) -> None:
    trainer = make()
    peft.get_peft_model(trainer.model, peft.LoraConfig(r=2, target_modules="all-linear"))
    with pytest.raises(InputError, match=r"does not train \d+ of .* such as '.*lora_A"):
        trainer.train()
    assert not (tmp_path / "out" / "userdp" / "run").exists()


def test_there_is_nothing_to_go_on_with_and_no_state_of_another_program(
    make: Callable[..., UserDPTrainer], tmp_path: Path
) -> None:
    state = transformers.TrainerState(best_metric=0.01, total_flos=12.0)
    state.log_history = [{"loss": 1.5, "step": 0}]
    (tmp_path / "out").mkdir()
    state.save_to_json(str(tmp_path / "out" / "trainer_state.json"))
    trainer = make(eval_dataset=texts(3, prefix="other"))
    with pytest.raises(InputError, match="so there is nothing to go on with"):
        trainer.train(resume_from_checkpoint=True)
    # A run that was stopped before its first step begins again.
    (tmp_path / "out" / "userdp" / "run").mkdir()
    trainer.train(resume_from_checkpoint=True)
    told = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert (told["best_metric"], told["total_flos"]) == (None, 0)
    assert not any("loss" in entry for entry in told["log_history"])
