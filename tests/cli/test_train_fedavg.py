"""`userdp train` with local training: it runs, is priced, reported and refused like any other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from dp_accounting import dp_event, pld

from cli_runner import userdp

WriteConfig = Callable[..., Path]

FEDAVG = """update = "fedavg"
local_learning_rate = 0.5
local_batch_size = 1
optimizer = "sgd"
fixed_seed = 7
"""
PRIVACY = "noise_multiplier = 1.0\ndelta = 1e-2\nclip_norm = 1.0"


def test_local_training_costs_what_gradients_cost(config_file: WriteConfig, tmp_path: Path) -> None:
    local = userdp(
        "train",
        config_file(training=FEDAVG, privacy=PRIVACY),
        "--out",
        tmp_path / "local",
        "--json",
    ).json
    plain = userdp(
        "train", config_file(privacy=PRIVACY, name="b.toml"), "--out", tmp_path / "b", "--json"
    ).json
    assert local["epsilon"] == plain["epsilon"]
    statement = json.loads((tmp_path / "local" / "statement.json").read_text())
    assert "local_learning_rate=0.5" in statement["mechanism"]
    assert "estimator f_f" in statement["mechanism"]
    report = userdp("report", tmp_path / "local", "--json").json
    assert "local training" in Path(report["card"]).read_text()


@pytest.mark.parametrize(
    ("chosen", "turns"),
    [
        ('sampler = "cyclic-poisson"\nparts = 2\nnoise = "banded"\nbands = 2', 2),
        ('sampler = "cyclic-poisson"\nparts = 2', 2),
    ],
    ids=["banded", "gaussian"],
)
def test_local_training_goes_with_correlated_noise(
    config_file: WriteConfig, tmp_path: Path, chosen: str, turns: int
) -> None:
    # DP-FTRL as it is deployed: local training, noise that later steps take back in part.
    path = config_file(training=FEDAVG, privacy=f"{PRIVACY}\n{chosen}")
    found = userdp("train", path, "--out", tmp_path / "run", "--json").json
    # A user's part has a turn in two of the four steps, with twice the coin.
    step = dp_event.PoissonSampledDpEvent(0.5, dp_event.GaussianDpEvent(1.0))
    accountant = pld.PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(step, turns)
    assert found["epsilon"] == pytest.approx(accountant.get_epsilon(1e-2), rel=1e-3)
    statement = json.loads((tmp_path / "run" / "statement.json").read_text())
    assert "local training" in statement["mechanism"]


def test_a_schedule_of_clip_norms_changes_no_price(
    config_file: WriteConfig, tmp_path: Path
) -> None:
    privacy = (
        'noise_multiplier = 1.0\ndelta = 1e-2\nclipping = "schedule"\n'
        "schedule = [[0, 1.0], [2, 0.25]]"
    )
    found = userdp("train", config_file(privacy=privacy), "--out", tmp_path / "run", "--json").json
    flat = userdp(
        "train", config_file(privacy=PRIVACY, name="b.toml"), "--out", tmp_path / "b", "--json"
    ).json
    assert found["epsilon"] == flat["epsilon"]
    lines = (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert rows[0]["plan"]["clip"]["phases"] == [[0, 1.0], [2, 0.25]]
    # Every phase has an entry of its own: the row of its first step.
    begun = {row["step"]: row["clip_norm"] for row in rows if "clip_norm" in row}
    assert begun == {0: 1.0, 2: 0.25}
    assert userdp("ledger", "verify", tmp_path / "run", "--json").json["ok"]


@pytest.mark.parametrize(
    ("training", "privacy", "told"),
    [
        ('update = "fedavg"', PRIVACY, "local_learning_rate is missing"),
        (FEDAVG, "noise_multiplier = 1.0\ndelta = 1e-2", "every local step"),
        (FEDAVG + 'estimator = "f_c"', PRIVACY, "min_weight"),
        (FEDAVG + 'estimator = "f"', PRIVACY, "true average"),
        ("local_epochs = 2", PRIVACY, "no meaning with update"),
        (FEDAVG + "local_epochs = 0", PRIVACY, "local_epochs=0"),
    ],
)
def test_what_makes_no_sense_is_told_in_one_line(
    config_file: WriteConfig, tmp_path: Path, training: str, privacy: str, told: str
) -> None:
    path = config_file(training=training, privacy=privacy)
    refused = userdp("train", path, "--out", tmp_path / "run")
    assert refused.code == 2
    assert told in refused.err
    assert refused.err.strip().count("\n") == 0
    assert not (tmp_path / "run").exists()
