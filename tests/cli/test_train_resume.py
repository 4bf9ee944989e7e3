"""`userdp train` with --resume, --fork, --steps and --dry-run, as a shell sees it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli_runner import userdp
from tiny import make_model, make_store

CONFIG = """[data]
store = "{place}/store"
sequence_length = 16
[model]
path = "{root}/base"
[privacy]
num_users = 24
expected_cohort_size = 6
group_size = 3
clip_norm = 0.5
{budget}
delta = 1e-2
[training]
steps = {steps}
learning_rate = {rate}
checkpoint_every = 2
{more}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resume")
    make_store(path / "untouched", [1, 2, 3, 4, 2, 5] * 4)
    make_model(path / "base")
    return path


def config(
    root: Path,
    place: Path,
    *,
    name: str = "train.toml",
    steps: int = 6,
    rate: float = 0.01,
    budget: str = "noise_multiplier = 1.0",
    more: str = "fixed_seed = 1",
) -> Path:
    path = place / name
    if not (place / "store").exists():
        # A copy of a store that was never counted has a budget of its own.
        shutil.copytree(root / "untouched", place / "store")
    path.write_text(
        CONFIG.format(root=root, place=".", steps=steps, rate=rate, budget=budget, more=more)
    )
    return path


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's path is relative, so that runs in different places are the same run."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def finished(root: Path) -> Path:
    """A run of six steps."""
    with contextlib.chdir(root):
        assert userdp("train", config(root, root), "--out", root / "run").code == 0
    return root / "run"


def test_a_changed_configuration_is_refused_and_a_fork_is_charged(
    root: Path, tmp_path: Path, finished: Path
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    for old in ("model", "checkpoints/step-000000006"):
        shutil.rmtree(tmp_path / "run" / old)
    ledger = tmp_path / "run" / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-2]))
    changed = config(root, tmp_path, rate=0.02)
    refused = userdp("train", changed, "--out", tmp_path / "run", "--resume")
    assert refused.code == 2
    assert "was begun with another" in refused.err
    assert "--fork" in refused.err
    # A change of the configuration alone is refused, too: whitespace is not a change.
    same = config(root, tmp_path, name="same.toml", more="fixed_seed = 1\n\n# a comment")
    other = config(root, tmp_path, name="other.toml", more="fixed_seed = 1\noptimizer = 'adamw'")
    refused = userdp("train", other, "--out", tmp_path / "run", "--resume")
    assert refused.code == 2
    assert "another configuration" in refused.err
    forked = userdp("train", changed, "--out", tmp_path / "run", "--fork", "--json").json
    # Six steps were planned, and the fork of the checkpoint after four takes two more.
    assert (forked["steps"], forked["new_steps"]) == (6, 2)
    as_planned = config(root, tmp_path, name="eight.toml", steps=8)
    alone = userdp("train", as_planned, "--out", tmp_path / "eight", "--json").json
    assert forked["epsilon"] == pytest.approx(alone["epsilon"], rel=1e-3)
    assert same.is_file()


def test_a_finished_run_says_so_again_or_goes_on(
    root: Path, tmp_path: Path, finished: Path
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    again = userdp("train", config(root, tmp_path), "--out", tmp_path / "run", "--resume", "--json")
    assert again.json["steps"] == 6
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == (
        finished / "ledger.jsonl"
    ).read_bytes()
    longer = userdp(
        "train",
        config(root, tmp_path),
        "--out",
        tmp_path / "run",
        "--resume",
        "--steps",
        8,
        "--json",
    ).json
    assert (longer["steps"], longer["new_steps"]) == (8, 2)
    check = userdp("ledger", "verify", tmp_path / "run", "--json").json
    assert (check["steps"], check["earlier_steps"]) == (2, 6)
    told = userdp("train", config(root, tmp_path), "--out", tmp_path / "run", "--resume").out
    assert "8 steps in all: 6 of the run before it, and 2 of this" in told
    assert longer["epsilon"] > again.json["epsilon"]


@pytest.mark.slow
def test_a_run_with_a_target_keeps_its_noise_when_it_goes_on(root: Path, tmp_path: Path) -> None:
    budget, out = "epsilon = 8.0", tmp_path / "run"
    given = config(root, tmp_path, budget=budget)
    assert userdp("train", given, "--out", out, "--json").json["epsilon"] <= 8.0
    first = json.loads((out / "ledger.jsonl").read_text().splitlines()[0])["plan"]
    longer = userdp("train", given, "--out", out, "--resume", "--steps", 9, "--json").json
    assert longer["epsilon"] > 8.0
    second = json.loads((out / "ledger.jsonl").read_text().splitlines()[0])["plan"]
    assert second["noise"] == first["noise"]


def test_a_dry_run_charges_and_trains_nothing(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    found = userdp("train", config(root, tmp_path), "--out", out, "--dry-run", "--json").json
    assert found["steps"] == 6
    assert not (out / "model").exists()
    rows = [json.loads(line)["kind"] for line in (out / "ledger.jsonl").read_text().splitlines()]
    assert rows.count("step") == 6
    assert rows[-1] == "end"
    assert userdp("account", out, "--json").json["epsilon"] == found["epsilon"]
    # Whoever reads any of its words sees that there is no model.
    assert found["dry_run"]
    assert not userdp("train", config(root, tmp_path, name="b.toml"), "--out", tmp_path / "b",
                      "--json").json["dry_run"]  # fmt: skip
    report = userdp("report", out, "--json").json
    for name in ("html", "card", "statement"):
        assert "this was a dry run" in Path(report[name]).read_text()
    refused = userdp("evaluate", out, tmp_path / "store")
    assert refused.code == 2
    assert "has no model" in refused.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--from-step", 3), "--from-step says where a fork begins"),
        (("--dry-run", "--resume"), "--dry-run begins a run of its own"),
        (("--fork",), "holds no run that was charged"),
        (("--steps", 0), "give at least one step"),
    ],
)
def test_wrong_options_are_refused(
    root: Path, tmp_path: Path, options: tuple[object, ...], message: str
) -> None:
    found = userdp("train", config(root, tmp_path), "--out", tmp_path / "run", *options)
    assert found.code == 2
    assert message in found.err
    assert found.err.splitlines()[-1].startswith("error: ")


def test_a_directory_that_holds_a_run_says_how_to_go_on(root: Path, finished: Path) -> None:
    found = userdp("train", root / "train.toml", "--out", finished)
    assert found.code == 2
    assert "already holds something" in found.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_a_signal_from_outside_ends_with_its_code_and_says_how_to_go_on(
    root: Path, tmp_path: Path, number: signal.Signals
) -> None:
    given = config(root, tmp_path, steps=4000, more="")
    out = tmp_path / "run"
    command = [sys.executable, "-c", "from userdp.cli import main; main()"]
    process = subprocess.Popen(
        [*command, "train", str(given), "--out", str(out)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TQDM_DISABLE": "1"},
    )
    ledger = out / "ledger.jsonl"
    while process.poll() is None and not (ledger.is_file() and ledger.stat().st_size > 5000):
        time.sleep(0.05)
    process.send_signal(number)
    _, told = process.communicate()
    assert process.returncode == 128 + number, told
    assert "stopped after step" in told
    assert "--resume" in told
    saved = sorted((out / "checkpoints").glob("step-*"))[-1]
    rows = ledger.read_text().count('"kind": "step"')
    assert saved.name == f"step-{rows:09d}"


def test_a_full_disk_is_one_line_and_loses_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Path
) -> None:
    out, given = tmp_path / "run", config(root, tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(out / "model"))

    with monkeypatch.context() as patched:
        patched.setattr("userdp.runs.record.save_model", full)
        stopped = userdp("train", given, "--out", out)
    assert stopped.code == 1
    assert "No space left on device" in stopped.err
    assert "--resume" in stopped.err
    assert "Traceback" not in stopped.err
    assert not (out / "model").exists()
    assert userdp("train", given, "--out", out, "--resume").code == 0
    for name in ("model/model.safetensors", "statement.json"):
        assert (out / name).read_bytes() == (finished / name).read_bytes()


def test_resume_says_when_it_begins_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "new"

    def resumed() -> str:
        # The configuration is read next, and is not there.
        found = userdp("train", tmp_path / "none.toml", "--out", out, "--resume")
        assert found.code == 2
        assert "none.toml: no such file" in found.err
        return found.err

    assert f"note: there is no run in {out}: --resume begins a new one, at a charge" in resumed()
    out.mkdir()
    assert "begins a new one" in resumed()
    (out / "ledger.jsonl").touch()
    assert "begins a new one" not in resumed()
