"""What a configuration turns into: optimizer, schedule, what the ledger is bound to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from userdp.clipping import summation
from userdp.clipping.batches import cohort
from userdp.clipping.settings import StepSettings
from userdp.config.file import load_config
from userdp.data.store import UserStore
from userdp.errors import InputError
from userdp.ledger.book import Ledger
from userdp.runs import saved as saved_run
from userdp.training.from_config import train_from_config


def test_ledger_is_bound_to_data_and_configuration(
    config_file: Callable[..., Path], tmp_path: Path, train_store: Path
) -> None:
    path = config_file()
    config = load_config(path)
    run = train_from_config(path, config, config.plan(), tmp_path / "run")
    first = json.loads((tmp_path / "run" / "ledger.jsonl").read_text().splitlines()[0])
    bound = first["bound_to"]
    assert bound["data"] == UserStore.open(train_store).fingerprint
    assert bound["config"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert set(bound) == {
        *(
            "data",
            "selection",
            "select",
            "sequence_length",
            "task",
            "tokenizer",
            "rows",
            "model",
            "initial_weights",
        ),
        *("optimizer", "schedule", "settings", "device", "hardware", "code", "config"),
    }
    assert first["fixed_seed"] is True
    assert (tmp_path / "run" / "config.toml").read_bytes() == path.read_bytes()
    assert run.path == tmp_path / "run"


def test_loaded_run_is_the_trained_model(config_file: Callable[..., Path], tmp_path: Path) -> None:
    for name, more in (("full", ""), ("adapter", "[model.lora]\nrank = 2")):
        path = config_file(model=more, name=f"{name}.toml")
        config = load_config(path)
        run = train_from_config(path, config, config.plan(), tmp_path / name)
        again, _, _ = saved_run.load_run(tmp_path / name)
        ids = torch.tensor([[1, 2, 3, 4]])
        with torch.no_grad():
            ours, theirs = (m.eval()(input_ids=ids).logits for m in (run.model, again))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_checkpointed_blocks_train_the_same_model(
    config_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One configuration for both: a run's noise follows from it. What it asks for is then undone.
    path = config_file(training="fixed_seed = 7\ncheckpoint_blocks = true")
    config = load_config(path)
    clipping = summation.FastClipping
    weights: list[dict[str, torch.Tensor]] = []
    for checkpoint in (True, False):

        def changed(*args: Any, settings: StepSettings, on: bool = checkpoint, **more: Any) -> Any:
            assert settings.checkpoint_blocks
            return clipping(*args, settings=replace(settings, checkpoint_blocks=on), **more)

        monkeypatch.setattr(summation, "FastClipping", changed)
        out = tmp_path / f"run {checkpoint}"
        run = train_from_config(path, config, config.plan(), out)
        weights.append(run.model.state_dict())
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name])


def test_directory_with_something_in_it_is_refused(
    config_file: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "mine").write_text("mine")
    path = config_file()
    config = load_config(path)
    with pytest.raises(InputError, match="already holds something"):
        train_from_config(path, config, config.plan(), out)
    assert [p.name for p in out.iterdir()] == ["mine"]


def test_run_refused_before_its_first_step_leaves_nothing(
    config_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config_file(training="join_records = true")
    config = load_config(path)
    monkeypatch.setattr(cohort, "can_join", lambda *args: False)
    with pytest.raises(InputError, match="does not keep records apart"):
        train_from_config(path, config, config.plan(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_run_that_fails_after_a_step_keeps_its_ledger(
    config_file: Callable[..., Path], tmp_path: Path
) -> None:
    path = config_file()
    config = load_config(path)

    def refuse(step: int) -> None:
        raise InputError(f"stopped after {step}")

    with pytest.raises(InputError, match="stopped after 1"):
        train_from_config(path, config, config.plan(), tmp_path / "run", on_step=refuse)
    assert Ledger.read(tmp_path / "run" / "ledger.jsonl").steps == 1
