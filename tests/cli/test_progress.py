"""The lines of a log: not too many, never less epsilon than was spent, and the time left."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from userdp.plan import Plan
from userdp.prices.marked import epsilon_of
from userdp.prices.marks import Hypothetical, RecordLevel
from userdp.statement import epsilon_text
from userdp.training.progress import TrainingProgress

PLAN = Plan.sample_users(
    num_users=1000,
    expected_cohort_size=20,
    group_size=4,
    steps=500,
    clip_norm=0.5,
    noise_multiplier=1.5,
    delta=1e-5,
)


@pytest.mark.slow
def test_a_log_has_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    progress = TrainingProgress(PLAN, (), (), bar=None, clock=lambda: now)
    for done in range(1, 501):
        now += 0.3
        progress.on_step(done)
    lines = capsys.readouterr().err.splitlines()
    # 150 seconds.
    assert 13 <= len(lines) <= 15
    for line in lines:
        found = re.fullmatch(
            r"step (\d+)/500, epsilon <= ([\d.]+) of ([\d.]+), (\d+) (s|min) left", line
        )
        assert found is not None, line
        done = int(found[1])
        assert float(found[2]) >= PLAN.epsilon(done)
        assert float(found[3]) == pytest.approx(PLAN.epsilon(), abs=0.01)
        seconds = float(found[4]) * (60 if found[5] == "min" else 1)
        assert seconds == pytest.approx(0.3 * (500 - done), abs=31)


def test_what_was_found_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    progress = TrainingProgress(PLAN, (), (), bar=None, clock=lambda: 0.0)
    progress.note(0, "held-out loss 3.1000")
    progress.on_step(1)
    progress.note(50, "held-out loss 3.0000")
    assert capsys.readouterr().err.splitlines()[0] == "step 0/500, held-out loss 3.1000"


def test_a_bar_is_updated_with_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[tuple[int, str]] = []
    progress = TrainingProgress(PLAN, (), (), bar=lambda *told: shown.append(told))
    for done in (1, 2, 500):
        progress.on_step(done)
    assert [done for done, _ in shown] == [1, 2, 500]
    assert shown[0][1] == shown[1][1]
    assert capsys.readouterr().err == ""


def test_no_epsilon_is_shown_where_the_plan_alone_does_not_tell_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = TrainingProgress(PLAN, (), (), bar=None, is_composed=True, clock=lambda: 0.0)
    progress.note(50, "held-out loss 3.0000")
    assert "epsilon" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mark", "name"),
    [
        (RecordLevel(), "record-level epsilon"),
        (Hypothetical(num_users=100_000, expected_groups=20), "hypothetical epsilon"),
    ],
    ids=["record level", "hypothetical"],
)
def test_a_marked_run_shows_what_its_mark_prices(
    mark: Any, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # Users of any number of records have no epsilon at all.
    unbounded = Plan.sample_records(
        num_users=1000,
        expected_batch_size=20,
        group_size=None,
        num_records=4000,
        steps=500,
        clip_norm=0.5,
        noise_multiplier=1.5,
        delta=1e-5,
        mark=RecordLevel(),
    )
    plan = unbounded if isinstance(mark, RecordLevel) else replace(PLAN, mark=mark)
    progress = TrainingProgress(plan, (), (), bar=None, clock=lambda: 0.0)
    progress.note(500, "held-out loss 3.0000")
    (line,) = capsys.readouterr().err.splitlines()
    spent = epsilon_text(epsilon_of(plan, 500) or math.nan)
    assert line == f"step 500/500, {name} <= {spent} of {spent}, held-out loss 3.0000"
    assert "inf" not in line


def test_a_run_that_goes_on_says_where_and_counts_to_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = TrainingProgress(PLAN, (), (), bar=None, is_composed=True, clock=lambda: 0.0)
    progress.on_begin(480, 5)
    progress.on_step(6)
    progress.note(20, "held-out loss 3.0000")
    assert capsys.readouterr().err.splitlines() == [
        "goes on after step 485 of 500",
        "step 500/500, 0 s left, held-out loss 3.0000",
    ]
    progress.on_begin(0, 0)
    assert capsys.readouterr().err == ""
