"""`ledger verify`, `finalize` and `export` from the command line, on runs that were trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cli_runner import userdp
from recorded_run import write_run
from tiny import make_model, make_store
from userdp.history import read_history
from userdp.models.load import load_model

CONFIG = """[data]
store = "{root}/store"
sequence_length = 16
[model]
path = "{root}/base"
{lora}
[privacy]
num_users = 20
expected_cohort_size = 10
group_size = 2
clip_norm = 1.0
noise_multiplier = 2.0
delta = 1e-3
[training]
steps = 3
path = "plain"
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a store, a model, a run on all weights and one of adapters."""
    found = tmp_path_factory.mktemp("commands")
    make_store(found / "store", [2] * 20)
    make_model(found / "base")
    for name, lora in (("whole", ""), ("adapter", "lora = { rank = 2 }")):
        (found / f"{name}.toml").write_text(CONFIG.format(root=found, lora=lora))
        assert userdp("train", found / f"{name}.toml", "--out", found / name).code == 0
    return found


def test_verify_says_yes_to_whole_runs_and_adds_them_up(root: Path) -> None:
    one = userdp("ledger", "verify", root / "whole", "--json").json
    assert (one["ok"], one["steps"], one["closed"], one["problems"]) == (True, 3, True, [])
    both = userdp("ledger", "verify", root / "whole", root / "adapter", "--json").json
    assert (both["ok"], both["steps"], both["closed"], both["problems"]) == (True, 6, True, [])
    assert [item["run"] for item in both["runs"]] == [str(root / "whole"), str(root / "adapter")]
    assert "whole and closed, 3 steps" in userdp("ledger", "verify", root / "whole").out


def test_verify_says_no_with_code_2_and_the_answer_on_stdout(root: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(root / "whole", tmp_path / "run"))
    weights = run / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    result = userdp("ledger", "verify", root / "adapter", run, "--json")
    assert result.code == 2
    assert result.err == ""
    told = json.loads(result.out)
    assert told["ok"] is False
    assert told["problems"][0].startswith(f"{run}: model/model.safetensors is not")
    assert [item["ok"] for item in told["runs"]] == [True, False]
    words = userdp("ledger", "verify", run)
    assert words.code == 2
    assert "NOT whole" in words.out


def test_verify_of_nothing_is_an_answer(tmp_path: Path) -> None:
    result = userdp("ledger", "verify", tmp_path / "nowhere", "--json")
    assert result.code == 2
    told = json.loads(result.out)
    assert (told["ok"], told["closed"], told["steps"]) == (False, False, 0)


def test_finalize_says_what_it_destroyed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    told = userdp("finalize", run, "--json").json
    assert "secret/noise.key" in told["files"]
    assert told["delta"] == 1e-3
    assert told["epsilon"] == userdp("account", run, "--json").json["epsilon"]
    assert "nothing was left" in userdp("finalize", run).out
    unfinished = write_run(tmp_path / "other", finish=False)
    assert userdp("finalize", unfinished).code == 2
    assert userdp("finalize", unfinished, "--unfinished", "--json").json["guarantee"] is False


def test_a_trained_run_is_finalized_and_still_evaluated(root: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(root / "whole", tmp_path / "run"))
    assert userdp("finalize", run).code == 0
    assert userdp("ledger", "verify", run).code == 0
    refused = userdp("evaluate", run, root / "store")
    # The list of training users is kept.
    assert "overlap" in refused.err


@pytest.mark.parametrize("name", ["whole", "adapter"])
def test_an_export_is_loaded_like_any_model_and_knows_its_past(
    root: Path, tmp_path: Path, name: str
) -> None:
    out = tmp_path / "out"
    # The base is loaded by the name that the export gives it.
    base = "org/base" if name == "adapter" else ""
    told = userdp(
        "export", root / name, "--out", out, "--base", base, "--license", "mit", "--json"
    ).json
    assert set(told["files"]) == {path.name for path in out.iterdir()}
    assert {"files", "epsilon", "delta"} <= set(told)
    assert userdp("ledger", "verify", out).code == 0
    history = read_history(out)
    assert history is not None
    assert len(history.entries) == 1
    for path in out.iterdir():
        assert str(root).encode() not in path.read_bytes()
    if name == "whole":
        load_model(str(out))
        result = userdp("evaluate", out, root / "store", "--allow-overlap", "--json").json
        of_run = userdp("evaluate", root / name, root / "store", "--allow-overlap", "--json").json
        assert result["loss"] == pytest.approx(of_run["loss"])
        assert userdp("evaluate", out, root / "store").code == 2


def test_an_adapter_on_a_local_base_is_refused_without_its_name(root: Path, tmp_path: Path) -> None:
    result = userdp("export", root / "adapter", "--out", tmp_path / "out")
    assert result.code == 2
    assert "--base NAME" in result.err
    assert list(tmp_path.iterdir()) == []
