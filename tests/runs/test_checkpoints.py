"""Checkpoints: what is saved comes back bit for bit, and nothing else comes back."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from userdp.errors import InputError, LedgerError
from userdp.runs.checkpoints import Checkpoints, Moment, Saving, check_saveable

KEY = bytes(range(32))


def moment(step: int, **changes: Any) -> Moment:
    torch.manual_seed(step)
    settings: dict[str, Any] = {
        "step": step,
        "head": f"hash {step}",
        "weights": {"a": torch.randn(3, 2), "b": torch.randn(4).to(torch.bfloat16)},
        "state": {
            "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]},
            "betas": (0.9, 0.999),
            "odd": [None, True, -0.0, math.inf, 1e-310, "text"],
        },
    }
    return Moment(**(settings | changes))


def saved(directory: Path, *steps: int, **options: Any) -> Checkpoints:
    checkpoints = Checkpoints(directory, KEY, Saving(**options))
    for step in steps:
        checkpoints.save(moment(step))
    checkpoints.wait()
    return checkpoints


def test_a_moment_comes_back_bit_for_bit(tmp_path: Path) -> None:
    found = saved(tmp_path, 7).newest()
    wanted = moment(7)
    assert found is not None
    assert (found.step, found.head) == (7, "hash 7")
    assert all(torch.equal(found.weights[n], t) for n, t in wanted.weights.items())
    assert found.weights["b"].dtype == torch.bfloat16
    assert found.state["betas"] == (0.9, 0.999)
    assert [repr(value) for value in found.state["odd"]] == list(map(repr, wanted.state["odd"]))
    assert torch.equal(found.state["optimizer"]["state"][0]["step"], torch.tensor(3.0))


def test_what_changes_after_the_call_is_not_saved(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, KEY)
    changing = torch.zeros(1000)
    checkpoints.save(moment(1, weights={"a": changing}, state={"noise": changing}))
    changing.fill_(1.0)
    checkpoints.wait()
    found = checkpoints.newest()
    assert found is not None
    assert not found.weights["a"].any()
    assert not found.state["noise"].any()


def test_only_the_last_are_kept_and_only_their_owner_reads_them(tmp_path: Path) -> None:
    saved(tmp_path / "c", 1, 2, 30, keep=2)
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [
        "step-000000002",
        "step-000000030",
    ]
    for path in (tmp_path / "c").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_a_damaged_checkpoint_is_passed_over_by_name(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    newest = tmp_path / "step-000000002" / "weights.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=r"step-000000002/weights.safetensors: damaged"):
        found = checkpoints.newest()
    assert found is not None
    assert found.step == 1


def test_every_edited_byte_and_every_cut_is_found(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    directory = tmp_path / "step-000000001"
    for path in sorted(directory.iterdir()):
        whole = path.read_bytes()
        edits = [whole[:i] + bytes([byte ^ 1]) + whole[i + 1 :] for i, byte in enumerate(whole)]
        for content in [*edits, *(whole[:end] for end in range(len(whole)))]:
            path.write_bytes(content)
            with pytest.raises(LedgerError):
                checkpoints._load(directory)
        path.write_bytes(whole)
    assert checkpoints._load(directory).step == 1


def test_a_checkpoint_of_another_run_or_step_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    with pytest.warns(UserWarning, match="not written by this run"):
        assert Checkpoints(tmp_path, bytes(32)).newest() is None
    (tmp_path / "step-000000001").rename(tmp_path / "step-000000002")
    with pytest.warns(UserWarning, match="damaged"):
        assert Checkpoints(tmp_path, KEY).newest() is None


def test_a_failed_save_is_raised_and_keeps_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = saved(tmp_path, 1)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("userdp.runs.checkpoints.save_file", full)
    checkpoints.save(moment(2))
    with pytest.raises(OSError, match="No space left"):
        checkpoints.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000001"]
    found = checkpoints.newest()
    assert found is not None
    assert found.step == 1


def test_due_by_steps_or_by_minutes(tmp_path: Path) -> None:
    by_steps = Checkpoints(tmp_path, KEY, Saving(every_steps=3))
    assert [step for step in range(1, 8) if by_steps.is_due(step)] == [3, 6]
    assert not Checkpoints(tmp_path, KEY, Saving(every_minutes=1e6)).is_due(5)
    assert Checkpoints(tmp_path, KEY, Saving(every_minutes=0)).is_due(5)


@pytest.mark.parametrize("options", [{"every_steps": 0}, {"keep": 0}])
def test_wrong_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Saving(**options)


def test_a_state_that_would_need_a_pickle_is_refused() -> None:
    with pytest.raises(InputError, match="holds a function"):
        check_saveable({"schedule": [lambda: 1]})
    check_saveable({"schedule": [None, 1.0]})


def test_the_manifest_is_canonical(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    path = tmp_path / "step-000000001" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=1))
    with pytest.raises(LedgerError):
        Checkpoints(tmp_path, KEY)._load(path.parent)
