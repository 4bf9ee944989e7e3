"""Lines of a run's log: public numbers, a few of them, and none beside another progress."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import userdp
from userdp.data.store import UserStore
from userdp.models.load import load_model
from userdp.plan import Plan
from userdp.streams import RunSecret
from userdp.training.step_log import LINES


def lines_of(base: Path, store: Path, caplog: pytest.LogCaptureFixture, **more: Any) -> list[str]:
    model, tokenizer = load_model(base)
    plan = Plan.sample_users(
        num_users=20,
        expected_cohort_size=6,
        group_size=1,
        steps=more.pop("steps"),
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-2,
    )
    with caplog.at_level(logging.INFO, logger="userdp"):
        userdp.train(
            model,
            tokenizer,
            UserStore.open(store),
            plan,
            sequence_length=16,
            settings=userdp.StepSettings(path="plain"),
            secret=RunSecret.fixed_for_tests(3),
            **more,
        )
    found = [r.getMessage() for r in caplog.records if r.name == "userdp.training.step_log"]
    caplog.clear()
    return found


def test_a_run_from_python_says_its_step_and_what_was_spent(
    base_model: Path, train_store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = lines_of(base_model, train_store, caplog, steps=3)
    assert [line.split(",")[0] for line in lines] == ["step 1/3", "step 2/3", "step 3/3"]
    assert all(", epsilon " in line and line.endswith(" s") for line in lines)
    # Nothing else is in a line.
    assert {line.count(",") for line in lines} == {2}
    many = lines_of(base_model, train_store, caplog, steps=2 * LINES + 1)
    assert len(many) <= LINES + 1
    assert many[-1].startswith(f"step {2 * LINES + 1}/")


def test_whoever_shows_progress_gets_no_second_one(
    base_model: Path, train_store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []
    assert not lines_of(base_model, train_store, caplog, steps=2, on_step=seen.append)
    assert seen == [1, 2]


def test_a_terminal_shows_a_bar_and_no_lines(
    base_model: Path,
    train_store: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # rich takes the stream for a terminal then.
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert not lines_of(base_model, train_store, caplog, steps=3)
    assert "3/3" in capsys.readouterr().err
    assert not lines_of(base_model, train_store, caplog, steps=3, on_step=lambda done: None)
    assert "3/3" not in capsys.readouterr().err
