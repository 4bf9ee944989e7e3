"""`userdp train` with every sampler on real text: abstracts with their authors."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import sampler_oracle
from cli_runner import userdp
from sampler_runs import stated, stop_after_four_steps, weights
from shared import SHARED, needs_shared
from tiny import make_model

pytestmark = [pytest.mark.slow, needs_shared]

SOURCE = SHARED / "data" / "acl_small_2016.jsonl.gz"
# Public numbers. There are fewer first authors than that.
USERS = 4500
# What stands in [privacy], and how far the stated epsilon may lie above the least that is known.
SAMPLERS: dict[str, tuple[str, float]] = {
    "capped-poisson": ("cap = 60", 1e-3),
    "cyclic-poisson": ("parts = 10", 1e-3),
    "balls-in-bins": ("", 0.1),
    "balanced-iteration": ("", 0.1),
    "allocation": ("", 0.1),
    "without-replacement": ("", 0.1),
    "min-separated": ("unit = 'record'\nadjacency = 'fixed-graph-zero-out'", 1e-3),
}
CONFIG = """[data]
store = "store"
sequence_length = 48
{selection}
[model]
path = "{base}"
[privacy]
num_users = {users}
sampler = "{sampler}"
clip_norm = 0.5
noise_multiplier = 0.6
delta = 1e-2
{privacy}
[training]
steps = 6
learning_rate = 0.01
checkpoint_every = 2
fixed_seed = 1
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("real")
    make_model(path / "base")
    for name, owners in (("one", "first"), ("all", "all")):
        options = ("--user", "users", "--text", "text", "--owners", owners)
        assert userdp("import", SOURCE, "--out", path / name, *options).code == 0
    bound = ["bound", path / "all", "--method", "min-separation", "--max-records-per-user", 9]
    bound += ["--steps", 6, "--batch-size", 40, "--separation", 3, "--out", path / "order.npz"]
    assert userdp(*bound).code == 0
    return path


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_run_on_abstracts_is_priced_as_recomputed_and_goes_on_bit_for_bit(
    root: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    is_ordered = name == "min-separated"
    shutil.copytree(root / ("all" if is_ordered else "one"), tmp_path / "store")
    privacy, excess = SAMPLERS[name]
    sized = "" if is_ordered else "expected_cohort_size = 45\ngroup_size = 2\n"
    config = tmp_path / "config.toml"
    config.write_text(
        CONFIG.format(
            base=root / "base",
            users=8000 if is_ordered else USERS,
            sampler=name,
            selection=f'selection = "{root / "order.npz"}"' if is_ordered else "",
            privacy=sized + privacy,
        )
    )
    run = tmp_path / "run"
    assert userdp("train", config, "--out", run, "--json").json["steps"] == 6
    least, _ = sampler_oracle.of_run(run)
    assert least - 1e-6 <= stated(run) <= least * (1 + excess) + 0.01
    before = weights(run)
    stop_after_four_steps(run)
    assert userdp("train", config, "--out", run, "--resume", "--json").json["steps"] == 6
    assert weights(run) == before
