"""`userdp train` under launchers: torchrun, its restarts, accelerate; and what is printed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks_runs import RECORDS, rows
from tiny_llama import make_llama

import userdp
from tiny import make_model, make_store
from userdp.runs.check import check_run

WORKER = Path(__file__).parent / "worker.py"
SOURCE = Path(userdp.__file__).parents[1]

CONFIG = """
[model]
path = "base"
[data]
store = "store"
sequence_length = 16
[privacy]
unit = "user"
num_users = 24
expected_cohort_size = 8
group_size = 3
noise_multiplier = 1.0
clip_norm = 0.5
delta = 1e-2
[training]
steps = 12
learning_rate = 0.01
checkpoint_every = 5
fixed_seed = 5
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return prepared(tmp_path / "a")


def prepared(place: Path) -> Path:
    """The same files in another place: a budget of its own, and the same run."""
    make_store(place / "store", RECORDS)
    make_model(place / "base")
    (place / "run.toml").write_text(CONFIG)
    return place


def launch(
    place: Path, *arguments: object, launcher: str = "torchrun", **environment: str
) -> subprocess.Popen[str]:
    """A launcher of two ranks; every error of a rank would be printed."""
    tool = Path(sys.executable).with_name(launcher)
    return subprocess.Popen(
        [str(tool), *map(str, arguments)],
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def launched(
    place: Path, *arguments: object, launcher: str = "torchrun", **environment: str
) -> subprocess.CompletedProcess[str]:
    """What a launcher of two ranks ends with."""
    process = launch(place, *arguments, launcher=launcher, **environment)
    out, err = process.communicate(timeout=240)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def weights(place: Path) -> bytes:
    return (place / "run" / "model" / "model.safetensors").read_bytes()


TWO = ("--standalone", "--nproc-per-node", 2)
TRAIN = ("train", "run.toml", "--out", "run", "--json")


@pytest.mark.slow
def test_a_killed_rank_is_restarted_and_nothing_is_lost(place: Path, tmp_path: Path) -> None:
    whole = launched(place, *TWO, WORKER, *TRAIN)
    assert whole.returncode == 0, whole.stderr
    # stdout is one JSON object: one rank prints.
    assert json.loads(whole.stdout)["steps"] == 12
    for rank in (0, 1):
        other = prepared(tmp_path / f"killed{rank}")
        killed = launched(
            other, *TWO, "--max-restarts", 1, WORKER, *TRAIN, USERDP_TEST_FAULT=f"{rank} 8 kill"
        )
        assert killed.returncode == 0, killed.stderr
        assert json.loads(killed.stdout)["steps"] == 12
        assert weights(other) == weights(place)
        assert (other / "run" / "ledger.jsonl").read_bytes() == (
            place / "run" / "ledger.jsonl"
        ).read_bytes()
        assert check_run(other / "run").problems == ()


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_and_is_named(place: Path) -> None:
    hung = launched(
        place,
        *TWO,
        *(WORKER, *TRAIN),
        USERDP_TEST_FAULT="1 8 hang",
        USERDP_RANK_TIMEOUT="5",
    )
    assert hung.returncode != 0
    told = [line for line in hung.stderr.splitlines() if line.startswith("error: ")]
    assert len(told) == 1, hung.stderr
    assert "rank 1 (process" in told[0]
    assert len(rows(place / "run")) == 1 + 8
    again = launched(place, *TWO, WORKER, *TRAIN, "--resume")
    assert again.returncode == 0, again.stderr
    assert check_run(place / "run").problems == ()


@pytest.mark.slow
def test_a_refusal_is_said_once_and_leaves_no_run(place: Path) -> None:
    (place / "run").mkdir()
    (place / "run" / "notes.txt").write_text("mine")
    refused = launched(place, *TWO, WORKER, *TRAIN)
    assert refused.returncode != 0
    told = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert told == ["error: run already holds something: choose another output directory."]
    assert [path.name for path in (place / "run").iterdir()] == ["notes.txt"]


@pytest.mark.slow
def test_a_signal_to_the_launcher_saves_the_run(place: Path) -> None:
    (place / "run.toml").write_text(CONFIG.replace("steps = 12", "steps = 5000"))
    process = launch(place, *TWO, WORKER, *TRAIN)
    ledger = place / "run" / "ledger.jsonl"
    end = time.monotonic() + 120
    while time.monotonic() < end and not (ledger.is_file() and len(rows(place / "run")) > 12):
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert "stopped after step" in err
    assert err.count("It is saved: go on with the same command and --resume") == 1
    steps = len(rows(place / "run")) - 1
    assert (place / "run" / "checkpoints" / f"step-{steps:09d}").is_dir()


@pytest.mark.slow
def test_accelerate_launches_the_same_run(place: Path, tmp_path: Path) -> None:
    ours = launched(place, *TWO, WORKER, *TRAIN)
    other = prepared(tmp_path / "other")
    # Without GPUs the launcher starts several processes only if it is told that there are some.
    options = ("--multi_gpu", "--num_processes", 2, "--num_machines", 1, "--dynamo_backend", "no")
    theirs = launched(
        other,
        *("launch", *options, "--mixed_precision", "no", WORKER, *TRAIN),
        launcher="accelerate",
    )
    assert ours.returncode == 0, ours.stderr
    assert theirs.returncode == 0, theirs.stderr
    assert json.loads(theirs.stdout.splitlines()[-1])["steps"] == 12
    assert (other / "run" / "secret" / "ranks").read_text() == "2\n"
    assert weights(place) == weights(other)


@pytest.mark.slow
def test_a_trainer_script_runs_on_two_ranks(tmp_path: Path) -> None:
    model = str(make_llama(tmp_path / "llama"))
    script = Path(__file__).parent / "trainer_script.py"
    tests = script.parents[1]
    helpers = os.pathsep.join(map(str, [SOURCE, tests, tests / "trainer"]))
    ended = launched(tmp_path, *TWO, script, model, "out", PYTHONPATH=helpers)
    assert ended.returncode == 0, ended.stderr
    out = tmp_path / "out"
    assert (out / "userdp" / "run" / "secret" / "ranks").read_text() == "2\n"
    assert check_run(out / "userdp" / "run").problems == ()
    assert (out / "checkpoint-4" / "model.safetensors").is_file()
    state = json.loads((out / "trainer_state.json").read_text())
    assert state["global_step"] == 6
    assert json.loads((out / "statement.json").read_text())["guarantee"] is True
    # One process logs.
    assert ended.stdout.count("'learning_rate'") == 3
