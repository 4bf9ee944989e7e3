"""`userdp train` with `shard = true` under torchrun: restarted, measured, resumed, exported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import userdp
from sharded_runs import furthest
from tiny import make_model, make_store
from userdp.runs.check import check_run

WORKER = Path(__file__).parents[1] / "ranks" / "worker.py"
SOURCE = Path(userdp.__file__).parents[1]
CONFIG = """
[model]
path = "base"
[data]
store = "store"
evaluation = "others"
sequence_length = 16
[privacy]
unit = "user"
num_users = 16
expected_cohort_size = 6
group_size = 3
noise_multiplier = 1.0
clip_norm = 0.5
delta = 1e-2
[training]
steps = 8
learning_rate = 0.01
checkpoint_every = 3
evaluate_every = 4
fixed_seed = 5
shard = true
"""


def prepared(place: Path) -> Path:
    make_store(place / "store", [2, 1, 3, 2] * 4)
    # The first sixteen users have no record there: they are those who train.
    make_store(place / "others", [0] * 16 + [2, 2, 2], seed=1)
    make_model(place / "base")
    (place / "run.toml").write_text(CONFIG)
    return place


def train(place: Path, ranks: int, *more: str, **environment: str) -> dict[str, object]:
    command = [sys.executable, "-m", "userdp"]
    if ranks > 1:
        torchrun = str(Path(sys.executable).with_name("torchrun"))
        command = [torchrun, "--standalone", "--nproc-per-node", str(ranks), *more, str(WORKER)]
    done = subprocess.run(
        [*command, "train", "run.toml", "--out", "run", "--json"],
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert check_run(place / "run").problems == ()
    return found


@pytest.mark.slow
def test_a_sharded_run_is_restarted_by_its_launcher_and_ends_as_one_process(tmp_path: Path) -> None:
    one = prepared(tmp_path / "one")
    alone = train(one, 1)
    killed = prepared(tmp_path / "killed")
    found = train(killed, 2, "--max-restarts", "1", USERDP_TEST_FAULT="1 5 kill")
    assert found["steps"] == alone["steps"] == 8
    weights = [load_file(place / "run" / "model" / "model.safetensors") for place in (one, killed)]
    assert furthest(weights[1], weights[0]) <= 1e-6
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert (killed / "run" / "secret" / "ranks").read_text() == "2 sharded\n"
