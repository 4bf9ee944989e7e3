"""McMahan et al. 2018, Tables 1 and 2, out of the ledgers of runs that charge and train nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from mcmahan import TABLE_1, TABLE_2

from cli_runner import userdp

WriteConfig = Callable[..., Path]
ROUNDS = 5_000
# Table 1 goes up to 10^6 rounds, which are as many rows. These are enough to see each row's entry.
ROUNDS_OF_TABLE_1 = (1, 10, 100, 1_000)


def charged(config_file: WriteConfig, out: Path, *, sampled: str, noise: float, **rest: str) -> str:
    """Epsilon of a dry run of FedAvg by the moments accountant, in the digits of `printed`."""
    users, delta, rounds, printed = rest["users"], rest["delta"], rest["rounds"], rest["printed"]
    path = config_file(privacy="clip_norm = 15.0", training="")
    text = path.read_text()
    text = text.replace("num_users = 20", f"num_users = {int(float(users))}")
    text = text.replace("expected_cohort_size = 5", f"expected_cohort_size = {float(sampled)}")
    text = text.replace("clip_norm", f"noise_multiplier = {noise}\ndelta = {delta}\nclip_norm")
    text = text.replace("steps = 4", f'steps = {rounds}\nupdate = "fedavg"')
    text = text.replace("learning_rate = 0.01", "learning_rate = 1.0\nlocal_learning_rate = 6.0")
    path.write_text(text)
    assert userdp("train", path, "--out", out, "--dry-run", "--json").code == 0
    # A dry run has no weights, so its record is read as one that was not finished.
    found = userdp("account", out, "--accountant", "moments", "--unfinished", "--json").json
    return f"{found['epsilon']:.{len(printed.partition('.')[2])}f}"


@pytest.mark.slow
@pytest.mark.parametrize(("users", "sampled", "printed"), TABLE_2)
def test_table_2_comes_out_of_a_ledger(
    config_file: WriteConfig, tmp_path: Path, users: str, sampled: str, printed: str
) -> None:
    found = charged(
        config_file,
        tmp_path / "run",
        sampled=sampled,
        noise=1.0,
        users=users,
        delta="1e-9",
        rounds=str(ROUNDS),
        printed=printed,
    )
    assert found == printed


@pytest.mark.parametrize(
    ("users", "sampled", "noise", "row"),
    [pytest.param(*row, marks=pytest.mark.slow if n else []) for n, row in enumerate(TABLE_1)],
)
def test_the_first_columns_of_table_1_come_out_of_ledgers(
    config_file: WriteConfig, tmp_path: Path, users: str, sampled: str, noise: float, row: str
) -> None:
    for rounds, printed in zip(ROUNDS_OF_TABLE_1, row.split(), strict=False):
        found = charged(
            config_file,
            tmp_path / f"run {rounds}",
            sampled=sampled,
            noise=noise,
            users=users,
            delta=repr(float(users) ** -1.1),
            rounds=str(rounds),
            printed=printed,
        )
        assert found == printed, rounds


def test_a_run_has_no_price_by_group_privacy(config_file: WriteConfig, tmp_path: Path) -> None:
    assert userdp("train", config_file(), "--out", tmp_path / "run", "--dry-run").code == 0
    told = userdp("account", tmp_path / "run", "--accountant", "group-privacy", "--unfinished")
    assert told.code == 2
    assert "by rdp or moments" in told.err


@pytest.mark.parametrize(
    "noise", ["1e-160", *(pytest.param(n, marks=pytest.mark.slow) for n in ("1e-7", "1e-200"))]
)
@pytest.mark.parametrize("by", ["moments", "rdp"])
def test_next_to_no_noise_has_no_epsilon_by_any_accountant(
    config_file: WriteConfig, tmp_path: Path, by: str, noise: str
) -> None:
    path = config_file(privacy=f"noise_multiplier = {noise}\ndelta = 1e-2\nclip_norm = 1.0")
    assert userdp("train", path, "--out", tmp_path / "run", "--dry-run").code == 0
    told = userdp("account", tmp_path / "run", "--accountant", by, "--unfinished")
    assert told.code == 2
    assert "no finite epsilon holds" in told.err
