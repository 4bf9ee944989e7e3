"""Every folder of a trainer that holds weights has a card, and it says what is promised."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import peft
import pytest
import transformers
from tiny_llama import make_llama, texts

from cli_runner import userdp as command
from userdp import Plan, UserDPTrainer
from userdp.prices.marks import Hypothetical
from userdp.statement import epsilon_text

pytest.importorskip("accelerate", reason="TrainingArguments needs accelerate")

USERS = 24


def first_line(folder: Path) -> str:
    """The first line of a card's text."""
    _, _, text = (folder / "README.md").read_text().partition("# Model card\n\n")
    return text.splitlines()[0]


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "unmarked"])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_every_folder_with_weights_has_a_card(tmp_path: Path, marked: bool, lora: bool) -> None:
    out = tmp_path / "out"
    arguments: dict[str, Any] = {
        "output_dir": str(out),
        "save_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    plan, mark = (
        Plan.sample_users(num_users=USERS, expected_cohort_size=6, steps=2, epsilon=8.0),
        "",
    )
    if marked:
        price = Hypothetical(num_users=5_000, expected_groups=plan.divisor)
        plan = dataclasses.replace(plan, mark=price)
        mark = "HYPOTHETICAL: priced as if there were 5,000 users"
    trainer = UserDPTrainer(
        str(make_llama(tmp_path / "llama")),
        transformers.TrainingArguments(**arguments),
        train_dataset=texts(USERS),
        peft_config=peft.LoraConfig(r=2, target_modules="all-linear") if lora else None,
        plan=plan,
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "elsewhere"))
    for folder in (out, tmp_path / "elsewhere", out / "userdp" / "run" / "model"):
        assert first_line(folder) == trainer.statement.sentence
    assert first_line(out).startswith(mark)
    if not marked:
        epsilon = epsilon_text(trainer.statement.epsilon)
        assert f"(epsilon={epsilon}, delta={trainer.plan.delta:g})" in first_line(out)
    for step in (1, 2):
        line = first_line(out / f"checkpoint-{step}")
        assert line.startswith(mark)
        assert "No privacy guarantee is stated here" in line
    assert command("ledger", "verify", out / "userdp" / "run").code == 0
