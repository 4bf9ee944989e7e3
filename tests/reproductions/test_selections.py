"""The comparison of selections (Chua et al. 2024), on a tiny model and made-up data."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from cli_runner import python
from reproductions.finetuning import selections
from reproductions.finetuning.selections import Arm, Settings
from tiny import make_model
from userdp.data.tokens import TokenRows
from userdp.streams import RunSecret

SETTINGS = Settings(
    length=8, group_size=2, expected=6, steps=2, delta=1e-2, learning_rate=1e-2, num_users=12
)


def made_up(seed: int, users: int = 12) -> TokenRows:
    """Users of one to six records of 2 to 20 tokens, cut into rows of 8."""
    rng = np.random.default_rng(seed)
    rows: list[tuple[int, int, np.ndarray]] = []
    record = 0
    for user in range(users):
        for _ in range(rng.integers(1, 7)):
            text = rng.integers(0, 10, size=rng.integers(2, 21))
            pieces = [text[begin : begin + 8] for begin in range(0, len(text), 8)]
            rows += [(user, record, piece) for piece in pieces if len(piece) > 1]
            record += 1
    return TokenRows(
        tokens=np.concatenate([piece for _, _, piece in rows]).astype(np.int32),
        indptr=np.concatenate([[0], np.cumsum([len(piece) for _, _, piece in rows])]),
        owners=np.array([user for user, _, _ in rows]),
        num_users=users,
        records=np.array([number for _, number, _ in rows]),
    )


@pytest.fixture(scope="module")
def base() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=11,
        n_positions=8,
        n_embd=8,
        n_layer=1,
        n_head=1,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config).eval()


def test_rows_survive_the_file(tmp_path: Path) -> None:
    rows = made_up(0)
    selections.write_rows(tmp_path / "rows.npz", rows)
    found = selections.read_rows(tmp_path / "rows.npz")
    assert rows.records is not None
    assert found.records is not None
    for name in ("tokens", "indptr", "owners", "records"):
        assert getattr(found, name).tolist() == getattr(rows, name).tolist()
    assert found.num_users == rows.num_users


def test_what_users_give_differs_as_the_criteria_say(base: torch.nn.Module) -> None:
    rows = made_up(0)
    losses = selections.record_losses(base, rows)
    found = {}
    for select in selections.Select:
        chosen = selections.chosen_rows(
            rows, losses, select, SETTINGS, RunSecret.fixed_for_tests(0)
        )
        found[select.value] = selections.describe(base, chosen, SETTINGS)
    length = {name: told["mean_length"] for name, told in found.items()}
    assert length["shortest"] < length["longest"]
    # Random rows are any rows, and the last row of a record is often short; chunks are full.
    assert length["random"] < length["longest"] < length["random-chunk"]
    perplexity = {name: told["mean_perplexity"] for name, told in found.items()}
    assert perplexity["lowest-perplexity"] < perplexity["highest-perplexity"]
    assert found["longest"]["share_below_length"] < found["shortest"]["share_below_length"]


def test_every_run_is_written_once_and_the_table_has_all_of_them(
    base: torch.nn.Module, tmp_path: Path
) -> None:
    before = [parameter.detach().clone() for parameter in base.parameters()]
    arms = [
        Arm(select="random", epsilon=math.inf, seed=0),
        Arm(select="random-chunk", epsilon=8.0, seed=0),
    ]
    path = tmp_path / "runs.jsonl"
    for more in (arms[:1], arms):
        table = selections.run_all(base, made_up(0), made_up(1), SETTINGS, more, path)
    runs = selections.read_runs(path)
    assert [(run["select"], run["epsilon"]) for run in runs] == [
        ("random", "inf"),
        ("random-chunk", "8"),
    ]
    assert all(math.isfinite(run["perplexity"]) for run in runs)
    assert {name: told["order"] for name, told in table.items()} == {
        "inf": ["random"],
        "8": ["random-chunk"],
    }
    # The public model is the beginning of every run.
    for one, two in zip(before, base.parameters(), strict=True):
        assert torch.equal(one, two)
    with pytest.raises(SystemExit, match="other settings"):
        selections.run_all(base, made_up(0), made_up(1), Settings(), arms, path)


def test_the_table_orders_by_the_mean_and_tells_the_spread_over_seeds() -> None:
    perplexities = {"random": [10.0, 12.0, 14.0], "longest": [9.0, 13.0, 8.0], "shortest": [20.0]}
    runs = [
        {"select": select, "epsilon": "8", "seed": seed, "perplexity": value}
        for select, values in perplexities.items()
        for seed, value in enumerate(values)
    ]
    found = selections.table(runs)["8"]
    assert found["order"] == ["longest", "random", "shortest"]
    longest = found["selections"]["longest"]
    assert longest["perplexity"] == {
        "mean": 10.0,
        "stdev": pytest.approx(math.sqrt(7)),
        "min": 8.0,
        "max": 13.0,
    }
    assert longest["to_random"]["mean"] == pytest.approx((-1 + 1 - 6) / 3)
    assert longest["better_than_random"] == "2 of 3"
    assert longest["rank"]["mean"] == pytest.approx(4 / 3)
    assert found["selections"]["shortest"]["perplexity"]["stdev"] is None


BLOCKED = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("duckdb", "pyarrow", "pydantic"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
from reproductions.finetuning import selections
selections.main({arguments!r})
"""


@pytest.mark.slow
def test_all_selections_run_where_arrow_duckdb_and_pydantic_are_not_installed(
    tmp_path: Path,
) -> None:
    make_model(tmp_path / "model", width=8)
    for name, seed in (("train", 0), ("held_out", 1)):
        selections.write_rows(tmp_path / f"{name}.npz", made_up(seed))
    files = [str(tmp_path / name) for name in ("train.npz", "held_out.npz", "model", "runs.jsonl")]
    numbers = "--length 8 --group-size 2 --expected 6 --steps 2 --delta 1e-2 --seeds 2"
    result = python(BLOCKED.format(arguments=["run", *files, *numbers.split(), "--resample"]))
    assert result.returncode == 0, result.stderr
    table = json.loads(result.stdout[result.stdout.index('{\n  "perplexity_before"') :])
    assert set(table["epsilons"]) == {"8", "inf"}
    for told in table["epsilons"].values():
        assert len(told["order"]) == 6
        assert all(row["perplexity"]["stdev"] is not None for row in told["selections"].values())
