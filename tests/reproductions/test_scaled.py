"""The study of scales, on made-up numbers: its parts are what they say."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from reproductions.finetuning import scaled as study


def test_scales_fall_with_the_size_of_gradients_and_have_size_one() -> None:
    found = study.scales(torch.tensor([1e-4, 1.0, 100.0]), 0.1)
    assert float(found.square().mean()) == pytest.approx(1)
    assert found[0] > found[1] > found[2]


@pytest.mark.parametrize("rank", [0, 2])
def test_every_arm_trains_and_scales_change_what_is_learned(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "STEPS", 3)
    monkeypatch.setattr(study, "DELAY", 1)
    monkeypatch.setattr(study, "COHORT", 4)
    torch.manual_seed(0)
    trained = study.Trained(base=study.Words(), rank=rank)
    rows = torch.randint(0, 20, (6, 2, study.LENGTH + 1))
    squares = torch.rand(len(trained.start))
    losses = [
        study.fine_tuned(
            trained,
            squares,
            list(rows),
            rows[0],
            study.Arm(how=how, epsilon=8.0, rate=0.01, floor=1.0),
        )
        for how in study.ARMS
    ]
    assert all(map(math.isfinite, losses))
    assert len(set(losses)) == len(study.ARMS)


def test_table_leaves_out_the_seed_that_chose_the_rate(tmp_path: Path) -> None:
    line = '{{"how": "adam", "epsilon": 8.0, "rate": 0.1, "floor": 0.0, "seed": {}, "loss": {}}}\n'
    (tmp_path / "runs.jsonl").write_text(line.format(0, 9.0) + line.format(1, 4.0))
    assert "| 8 | adam | 0.1 | 0 | 4.000 | 4.000 to 4.000 |" in study.table(tmp_path / "runs.jsonl")
