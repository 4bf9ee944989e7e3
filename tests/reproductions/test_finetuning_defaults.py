"""The study behind the defaults, on made-up text: it runs, and its noise is what it says."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import torch

from reproductions.finetuning import defaults as study
from userdp.accounting import accountant, events
from userdp.units import Adjacency


def write(path: Path, records: list[dict[str, object]]) -> Path:
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return path


def test_one_arm_of_each_kind_trains_from_people_to_a_loss(tmp_path: Path) -> None:
    books = write(tmp_path / "books.jsonl.gz", [{"text": "once upon a time " * 20}])
    said = [{"users": [f"u{i % 70}"], "text": f"word {i} and more"} for i in range(140)]
    both = [{"users": ["u1", "u2"], "text": "of two"}]
    spoken = write(tmp_path / "people.jsonl.gz", said + both)
    rows, held_out = study.people(spoken)
    assert rows.num_users == 70 - study.HELD_OUT
    assert len(held_out) == 2 * study.HELD_OUT
    base = study.public_model(books, 21, width=8, layers=1)
    before = study.held_out_loss(base, held_out)
    for kind in ("lora", "full"):
        tuned = study.fine_tune(base, rows, study.Arm(kind=kind, cohort=3, steps=2, rate=0.1))
        assert math.isfinite(study.held_out_loss(tuned, held_out))
        assert study.held_out_loss(tuned, held_out) != before
    assert study.held_out_loss(base, held_out) == before


def test_noise_is_that_of_the_run_that_is_priced() -> None:
    of_mean = study.priced_noise(8.0, 60)
    step = events.poisson_users_gaussian(
        user_sampling_prob=study.PRICED_COHORT / study.PRICED_USERS,
        noise_multiplier=of_mean * study.PRICED_COHORT,
    )
    found = accountant.evaluate(
        events.repeated(step, 60), delta=study.DELTA, adjacency=Adjacency.ADD_REMOVE
    )
    assert 0.99 * 8 <= found.epsilon <= 8


def test_every_arm_is_tried_with_two_seeds_and_can_be_made() -> None:
    arms = list(study.arms())
    assert {arm.seed for arm in arms} == {0, 1}
    assert all(torch.isfinite(torch.tensor(arm.clip_rule.bound)) for arm in arms)
