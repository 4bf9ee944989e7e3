"""Commands that read a run take a trainer's output_dir, too."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_llama import texts

from cli_runner import userdp
from userdp import UserDPTrainer, UserStore
from userdp.data.identity import key_beside
from userdp.runs.files import run_at

pytest.importorskip("accelerate", reason="TrainingArguments needs accelerate")


def test_commands_find_the_run_of_a_trainer(
    make: Callable[..., UserDPTrainer], tmp_path: Path
) -> None:
    trainer = make(arguments={"save_steps": 2})
    trainer.train()
    out = tmp_path / "out"
    run = out / "userdp" / "run"
    assert run_at(out) == run == run_at(run)
    assert run_at(tmp_path) == tmp_path
    key = key_beside(trainer.train_store.path)
    others = tmp_path / "others"
    UserStore.from_dataset(texts(4, prefix="other"), others, key=key)
    mine = tmp_path / "mine"
    UserStore.from_dataset(texts(4), mine, key=key)

    measured = userdp("evaluate", out, others, "--json")
    assert measured.json["users"] == 4
    assert userdp("evaluate", out / "checkpoint-2", others, "--json").json["users"] == 4
    for model in (out, out / "checkpoint-2"):
        refused = userdp("evaluate", model, mine)
        assert "4 of its users are training users too" in refused.err
    assert userdp("report", out, "--json").json["html"] == str(run / "report.html")
    assert userdp("account", out, "--json").json["epsilon"] <= 8.0
    assert userdp("ledger", "verify", out, "--json").json["ok"]
    assert userdp("export", out, "--out", tmp_path / "public", "--json").json["guarantee"]
    assert "its run is" in userdp("finalize", out).err
    assert not (run / "secret" / "noise.key").exists()
    shutil.rmtree(run / "secret")
    unknown = userdp("evaluate", out / "checkpoint-2", mine)
    assert "overlap of users cannot be checked" in unknown.err
