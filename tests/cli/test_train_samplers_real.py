"""`userdp train` with every sampler and noise on real text: abstracts with their authors."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import dp_event, pld, rdp

import correlated_oracle
import sampler_oracle
from cli_runner import userdp
from sampler_runs import plan_of, stated, stop_after_four_steps, weights
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


def write_config(root: Path, tmp_path: Path, sampler: str, privacy: str, *, cohort: int) -> Path:
    """A configuration beside a store of its own: records of all owners if their order is fixed."""
    is_ordered = sampler == "min-separated"
    shutil.copytree(root / ("all" if is_ordered else "one"), tmp_path / "store")
    sized = "" if is_ordered else f"expected_cohort_size = {cohort}\ngroup_size = 2\n"
    config = tmp_path / "config.toml"
    config.write_text(
        CONFIG.format(
            base=root / "base",
            users=8000 if is_ordered else USERS,
            sampler=sampler,
            selection=f'selection = "{root / "order.npz"}"' if is_ordered else "",
            privacy=sized + privacy,
        )
    )
    return config


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_run_on_abstracts_is_priced_as_recomputed_and_goes_on_bit_for_bit(
    root: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    privacy, excess = SAMPLERS[name]
    config = write_config(root, tmp_path, name, privacy, cohort=45)
    run = tmp_path / "run"
    assert userdp("train", config, "--out", run, "--json").json["steps"] == 6
    least, _ = sampler_oracle.of_run(run)
    assert least - 1e-6 <= stated(run) <= least * (1 + excess) + 0.01
    before = weights(run)
    stop_after_four_steps(run)
    assert userdp("train", config, "--out", run, "--resume", "--json").json["steps"] == 6
    assert weights(run) == before


# Sampler, noise and what else stands in [privacy].
NOISES = {
    "banded, cyclic": ("cyclic-poisson", 'noise = "banded"\nbands = 3\nparts = 3'),
    "banded, balls in bins": ("balls-in-bins", 'noise = "banded"\nbands = 3'),
    "banded, fixed order": (
        "min-separated",
        'noise = "banded"\nbands = 3\nunit = "record"\nadjacency = "fixed-graph-replace"',
    ),
    "inverse square root, fixed order": (
        "min-separated",
        'noise = "banded"\nbands = 3\nstrategy = "inverse-square-root"\nunit = "record"\n'
        'adjacency = "fixed-graph-zero-out"',
    ),
    "discrete": ("poisson", 'noise = "discrete"'),
}


@pytest.mark.parametrize("name", NOISES)
def test_every_noise_on_abstracts_is_priced_as_recomputed_and_goes_on_bit_for_bit(
    root: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sampler, privacy = NOISES[name]
    # As many bins as steps, and so at least as many as bands.
    config = write_config(root, tmp_path, sampler, privacy, cohort=750)
    run = tmp_path / "run"
    assert userdp("train", config, "--out", run, "--json").json["steps"] == 6
    least, most = priced(plan_of(run))
    assert least - 1e-6 <= stated(run) <= most * 1.001 + 0.01
    before = weights(run)
    stop_after_four_steps(run)
    assert userdp("train", config, "--out", run, "--resume", "--json").json["steps"] == 6
    assert weights(run) == before


def priced(plan: dict[str, Any]) -> tuple[float, float]:
    """The least and the largest epsilon that the run may state."""
    noise, sampler = plan["noise"], plan["sampler"]
    if noise["type"] == "Discrete":
        found = whole_order_epsilon(plan)
        return found, found
    if sampler["type"] != "BallsInBins":
        found = correlated_oracle.of_plan(plan)
        return found, found
    # Correlation of noise takes away from what bins hide, and at most all of it.
    hidden, _ = sampler_oracle.of_plan(plan | {"noise": noise | {"type": "Gaussian"}})
    rounds = -(-plan["steps"] // sampler["bins"])
    accountant = pld.PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(dp_event.GaussianDpEvent(noise["noise_multiplier"] / rounds**0.5))
    return hidden, accountant.get_epsilon(plan["delta"])


def whole_order_epsilon(plan: dict[str, Any]) -> float:
    """By `dp_accounting`'s Renyi accountant at whole orders, whose moments are the Gaussian's."""
    accountant = rdp.RdpAccountant(orders=list(range(2, 257)))
    step = dp_event.GaussianDpEvent(plan["noise"]["noise_multiplier"])
    rate = plan["sampler"]["user_sampling_prob"]
    accountant.compose(dp_event.PoissonSampledDpEvent(rate, step), plan["steps"])
    return accountant.get_epsilon(plan["delta"])
