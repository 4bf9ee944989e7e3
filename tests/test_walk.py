"""docs/walk.md, held against a traced step."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import tiny
import userdp
from userdp import Plan, PrivateStep, StepSettings
from userdp.data.choose import Choice, contributions
from userdp.data.tokens import tokenise
from userdp.streams import RunSecret
from userdp.tasks import CausalTask, cohort_batches

SOURCE = Path(userdp.__file__).parent
PAGE = (Path(__file__).parents[1] / "docs" / "walk.md").read_text()
LARGEST = {"plain": 14, "fast": 28}


def files_in(text: str) -> set[str]:
    return set(re.findall(r"`([\w/]+\.py)`", text))


def sections() -> dict[str, str]:
    plain, fast, beside = re.split(r"\n## .*\n", PAGE)[1:]
    return {"plain": plain, "fast": fast, "beside": beside}


def way(path: str) -> set[str]:
    """The files of the numbered lines, first column of files only."""
    lines = re.findall(r"^\| \d+ \| `([\w/]+\.py)`", sections()[path], flags=re.M)
    shared = re.findall(r"^\| [1-6] \| `([\w/]+\.py)`", sections()["plain"], flags=re.M)
    return {*lines, *(shared if path == "fast" else ())}


def traced(run: Callable[[], Any]) -> set[str]:
    """The files of the library whose code runs."""
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(SOURCE)):
            seen.add(Path(name).relative_to(SOURCE).as_posix())

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("path", ["plain", "fast"])
def test_a_step_passes_the_listed_files_and_no_other(path: Any, tmp_path: Path) -> None:
    store = tiny.make_store(tmp_path / "store", [2, 3, 1, 4] * 4)
    model, tokenizer = tiny.make_model(tmp_path / "model")
    plan = Plan.sample_users(
        num_users=16,
        # Everybody with everything, so that all steps have the same batches.
        expected_cohort_size=16,
        group_size=4,
        steps=4,
        clip_norm=0.5,
        noise_multiplier=1.0,
        delta=1e-2,
    )
    seen = traced(lambda: tokenise(store, tokenizer, sequence_length=16, verify=True))
    chosen = contributions(
        tokenise(store, tokenizer, sequence_length=16, verify=True),
        Choice(),
        unit=plan.sampler.unit,
        group_size=4,
        sequence_length=16,
        streams=RunSecret.from_system().streams("choose rows"),
    )
    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        plan,
        chosen.index(),
        settings=StepSettings(path=path),
        sequence_length=16,
    )

    def take() -> None:
        cohort = step.draw()
        streams = step.record.streams("rows")
        task = CausalTask(pad_token=tokenizer.pad_token_id)
        step.apply(cohort_batches(chosen, cohort, task, step=step.record.steps, streams=streams))

    # The first steps also probe the model and compare new batch shapes.
    take()
    take()
    seen |= traced(take)
    listed = way(path) | files_in(sections()["beside"])
    # The fast path logs and falls back through the plain loop's code.
    allowed = {"clipping/plain.py"} if path == "fast" else set[str]()
    assert seen - listed - allowed == set()
    assert way(path) - seen == set()


@pytest.mark.parametrize("path", ["plain", "fast"])
def test_the_way_is_short(path: str) -> None:
    assert len(way(path)) <= LARGEST[path]


def test_every_listed_file_is_there() -> None:
    assert {name for name in files_in(PAGE) if not (SOURCE / name).is_file()} == {
        "tests/test_walk.py"
    }
