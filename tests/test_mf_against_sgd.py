"""DP-SGD against DP-MF on Ganesh et al.'s logistic task: the stored results, and a small run."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from reproductions.ganesh2025 import mf_against_sgd as study
from userdp.noise import Banded, Gaussian

DOCS = Path(__file__).parent.parent / "docs" / "noise.md"


def test_the_printed_table_is_that_of_the_results_and_each_method_wins_somewhere() -> None:
    rows = [json.loads(line) for line in study.RESULTS.read_text().splitlines()]
    table = study.table(rows)
    assert table in DOCS.read_text(encoding="utf-8")
    wins = [int(found) for found in re.findall(r"DP-MF in (\d) of 3 seeds", table)]
    assert len(wins) == len(study.GRAPHS) * len(study.EPSILONS)
    assert {0, 3} <= set(wins)
    assert {row["seed"] for row in rows} == set(study.SEEDS)


@pytest.mark.parametrize("bound", [None, 2])
def test_a_small_run_trains_with_the_parts_that_are_priced(
    bound: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"RECORDS": 400, "TRAINED": 300, "VALIDATED": 50, "DIMENSION": 4, "STEPS": 8}
    for name, value in (small | {"BATCH": 20}).items():
        monkeypatch.setattr(study, name, value)
    task = study.task_of("regular", 2.0, 0)
    setting = study.Setting(graph="regular", mean_records=2.0, epsilon=8.0, bound=bound, rate=2.0)
    model, plan = study.trained(task, setting, 0)
    assert isinstance(plan.noise, Gaussian if bound else Banded)
    assert plan.epsilon() == pytest.approx(8.0, rel=2e-3)
    loss, accuracy = study.measured(task, model, 300, 400)
    assert loss < math.log(2) * 1.5
    assert accuracy > 0.5
