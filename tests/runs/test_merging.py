"""An adapter and its merged weights, loaded from elsewhere by a program without userdp."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import userdp
from cli_runner import userdp as command
from tiny import make_model, make_store
from userdp.data.array_files import file_digest
from userdp.errors import LedgerError
from userdp.history import history_of
from userdp.runs.check import check_run
from userdp.runs.merging import export_merged

LOADS = """
import sys, torch, peft, transformers
kinds = peft.AutoPeftModelForCausalLM, transformers.AutoModelForCausalLM
for kind, place in zip(kinds, sys.argv[1:]):
    with torch.no_grad():
        print(kind.from_pretrained(place).eval()(torch.arange(5)[None]).logits.double().sum().item())
assert not any(name.split(".")[0] == "userdp" for name in sys.modules)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A finished run of an adapter on a base that was named by a relative path."""
    root = tmp_path_factory.mktemp("merging")
    store = make_store(root / "store", [3] * 12)
    make_model(root / "base")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        model, tokenizer = userdp.load_model("base", lora=userdp.Lora(rank=2))
        plan = userdp.Plan.sample_users(
            num_users=12,
            expected_cohort_size=4,
            group_size=2,
            steps=3,
            clip_norm=1.0,
            noise_multiplier=1.0,
            delta=1e-3,
        )
        userdp.train(
            model, tokenizer, store, plan, learning_rate=0.1, sequence_length=64, out="run"
        )
    with torch.no_grad():
        told = model(torch.arange(5)[None]).logits.double().sum().item()
    return root / "run", told


def test_adapter_and_merged_weights_load_from_another_folder_without_userdp(
    trained: tuple[Path, float], tmp_path: Path
) -> None:
    run, told = trained
    out = tmp_path / "merged"
    done = command("export", run, "--out", out, "--base", "org/base", "--merged", "--json").json
    # -I: neither this folder nor PYTHONPATH counts.
    loads = subprocess.run(
        [sys.executable, "-I", "-c", LOADS, str(run / "model"), str(out)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert loads.returncode == 0, loads.stderr
    found = [float(line) for line in loads.stdout.splitlines()]
    assert found == pytest.approx([told, told], abs=1e-4)

    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert files == set(done["files"])
    assert check_run(out / "record").ok
    # The ledger names the adapter: nothing here says that merged weights were not changed.
    verified = command("ledger", "verify", out, "--json")
    assert verified.code == 2
    told = json.loads(verified.out)
    assert not told["ok"]
    assert f"Verify {out / 'record'}, and merge it" in told["problems"][0]
    assert command("ledger", "verify", out / "record", "--json").json["ok"]
    card = (out / "README.md").read_text()
    assert "library_name: transformers" in card
    assert file_digest(out / "model.safetensors") in card
    assert file_digest(run / "model" / "adapter_model.safetensors") in card
    for path in out.rglob("*"):
        assert path.is_dir() or str(run.parent).encode() not in path.read_bytes()
    # Whoever trains on pays for what was spent.
    model, _ = userdp.load_model(out)
    assert history_of(model).all_entries()


def test_another_base_is_not_merged(trained: tuple[Path, float], tmp_path: Path) -> None:
    run, _ = trained
    base = run.parent / "base"
    base.rename(run.parent / "right")
    make_model(base, seed=1)
    try:
        with pytest.raises(LedgerError, match="not the one the adapter was trained on"):
            export_merged(run, tmp_path / "out", base="org/base")
    finally:
        for path in base.iterdir():
            path.unlink()
        base.rmdir()
        (run.parent / "right").rename(base)
    assert not (tmp_path / "out").exists()


def test_a_whole_model_has_nothing_to_merge(tmp_path: Path) -> None:
    from recorded_run import write_run

    run = write_run(tmp_path / "run")
    with pytest.raises(userdp.InputError, match="leave --merged out"):
        export_merged(run, tmp_path / "out")
