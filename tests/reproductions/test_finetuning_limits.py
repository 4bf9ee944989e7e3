"""Lengths and directions of users' updates, against pairs counted one by one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from finetuning_sets import write_set
from reproductions.finetuning import limits
from tiny import make_model


def test_the_mean_cosine_is_that_of_all_pairs() -> None:
    found = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    pairs = [
        float(torch.cosine_similarity(found[one], found[two], dim=0))
        for one in range(6)
        for two in range(6)
        if one != two
    ]
    assert limits.mean_cosine(found) == pytest.approx(np.mean(pairs), abs=1e-6)


def test_signal_over_noise_follows_from_what_is_told(tmp_path: Path) -> None:
    make_model(tmp_path / "model", width=8)
    write_set(tmp_path / "made_up.npz")
    numbers = "--users 8 --k 2 --cohort 6 --steps 2 --length 8".split()
    files = [str(tmp_path / name) for name in ("model", "made_up.npz")]
    limits.main([*files, *numbers, "--json", str(tmp_path / "told.jsonl")])
    told = json.loads((tmp_path / "told.jsonl").read_text())
    assert told["norm"]["0.1"] <= told["norm"]["0.5"] <= told["norm"]["0.9"]
    at_8 = told["epsilon 8"]
    noise = at_8["noise_multiplier"] * math.sqrt(told["weights"]) / 6
    assert at_8["signal_over_noise"] == pytest.approx(math.sqrt(told["mean_cosine"]) / noise)
    assert told["epsilon 1"]["signal_over_noise"] < at_8["signal_over_noise"]
