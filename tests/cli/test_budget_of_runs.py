"""Two runs, a fork, a continued run and a quantile on one store: what `userdp budget` says."""

from __future__ import annotations

import json
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from cli_runner import userdp
from tiny import make_model, make_store

DELTA = 1e-3
RATE = 6 / 24

CONFIG = """[data]
store = "store"
sequence_length = 16
[model]
path = "base"
[privacy]
num_users = 24
expected_cohort_size = 6
group_size = 3
clip_norm = 0.5
noise_multiplier = {noise}
delta = {delta}
[training]
steps = {steps}
learning_rate = {rate}
checkpoint_every = 2
"""


def config(name: str, *, noise: float, steps: int, rate: float = 0.01) -> Path:
    path = Path(f"{name}.toml")
    path.write_text(CONFIG.format(noise=noise, steps=steps, rate=rate, delta=DELTA))
    return path


def step_event(noise: float) -> dp_accounting.DpEvent:
    return dp_accounting.PoissonSampledDpEvent(RATE, dp_accounting.GaussianDpEvent(noise))


def test_the_budget_is_the_composition_of_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_store(tmp_path / "store", [1, 2, 3, 4, 2, 5] * 4)
    make_model(tmp_path / "base")
    first, second = config("first", noise=3.0, steps=6), config("second", noise=4.0, steps=5)
    assert userdp("train", first, "--out", "one").code == 0
    assert userdp("train", second, "--out", "two").code == 0
    changed = config("changed", noise=3.0, steps=9, rate=0.05)
    forked = userdp("train", changed, "--out", "one", "--fork", "--json").json
    longer = userdp("train", second, "--out", "two", "--resume", "--steps", 7, "--json").json
    assert (forked["new_steps"], longer["new_steps"]) == (3, 2)
    options = ("--quantile", 0.5, "--largest", 8, "--epsilon", 0.5, "--delta", DELTA)
    assert userdp("quantile", "store", *options, "--out", "paid.json").code == 0
    found = userdp("budget", "store", "--delta", DELTA, "--json").json
    assert len(found["entries"]) == 5
    # Composed by another library, from the numbers in the configurations alone.
    accountant = PLDAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        value_discretization_interval=1e-4,
    )
    accountant.compose(step_event(3.0), 6 + 3)
    accountant.compose(step_event(4.0), 5 + 2)
    look = json.loads(Path("paid.json").read_text())["event"]
    assert look["type"] == "GaussianDpEvent"
    accountant.compose(dp_accounting.GaussianDpEvent(look["noise_multiplier"]))
    assert found["spent_epsilon"] == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-3)
    # A limit just above: the next run is refused before it has written anything.
    limit = found["spent_epsilon"] * 1.001
    assert userdp("budget", "store", "--limit", limit, "--delta", DELTA).code == 0
    before = {p: p.read_bytes() for p in Path("store.population").rglob("*") if p.is_file()}
    refused = userdp("train", config("third", noise=3.0, steps=1), "--out", "three")
    assert refused.code == 3
    assert refused.err.splitlines()[-1].startswith("error: ")
    assert not Path("three").exists()
    after = {p: p.read_bytes() for p in Path("store.population").rglob("*") if p.is_file()}
    assert after == before
    # So is a quantile, a fork and a longer run; what was there stays as it was.
    assert userdp("quantile", "store", *options, "--out", "again.json").code == 3
    ledger = Path("one/ledger.jsonl").read_bytes()
    more = config("more", noise=3.0, steps=12, rate=0.05)
    assert userdp("train", more, "--out", "one", "--fork").code == 3
    assert userdp("train", second, "--out", "two", "--resume", "--steps", 9).code == 3
    assert Path("one/ledger.jsonl").read_bytes() == ledger
    assert userdp("ledger", "verify", "one", "two", "--json").json["ok"]
