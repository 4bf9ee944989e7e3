"""What a run from Python shows: a bar on a terminal, lines elsewhere, nothing beside `on_step`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import userdp
from userdp.data.store import UserStore
from userdp.models.load import load_model
from userdp.plan import Plan
from userdp.streams import RunSecret
from userdp.training.validation import Validation


@pytest.fixture
def shown(base_model: Path, train_store: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Trains a few steps and returns what stderr showed."""
    model, tokenizer = load_model(base_model)
    plan = Plan.sample_users(
        num_users=20,
        expected_cohort_size=6,
        group_size=1,
        steps=3,
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-2,
    )

    def train(**more: Any) -> str:
        capsys.readouterr()
        userdp.train(
            model,
            tokenizer,
            UserStore.open(train_store),
            plan,
            sequence_length=16,
            settings=userdp.StepSettings(path="plain"),
            secret=RunSecret.fixed_for_tests(3),
            **more,
        )
        return capsys.readouterr().err

    return train


def test_a_log_or_a_notebook_has_a_line_for_every_measurement(
    shown: Any, held_out_store: Path
) -> None:
    lines = shown(validation=Validation(store=UserStore.open(held_out_store), every=2)).splitlines()
    assert lines[0] == "training"
    assert [line.split(",")[0] for line in lines[1:]] == ["step 0/3", "step 2/3", "step 3/3"]
    assert all(", held-out loss " in line for line in lines[1:])
    assert ", epsilon <= " in lines[-1]


def test_a_terminal_shows_a_bar(shown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # rich takes the stream for a terminal then.
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert "3/3" in shown()


def test_whoever_gives_on_step_shows_progress_alone(
    shown: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert shown(on_step=seen.append) == ""
    assert seen == [1, 2, 3]
