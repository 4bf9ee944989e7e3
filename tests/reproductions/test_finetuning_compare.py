"""Tables of fine-tuning runs, on a tiny model and made-up data."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cli_runner import python
from finetuning_sets import write_set
from reproductions.finetuning import prepare
from reproductions.finetuning.compare import Comparison, best_rate, finished, run_table
from reproductions.finetuning.sets import Set
from reproductions.finetuning.settings import Setting, plan_of, settings_of, share_of_rate
from tiny import make_model
from userdp.data.choose import Select
from userdp.errors import InputError
from userdp.streams import RunSecret

TABLES = sorted(Path("reproductions/finetuning/tables").glob("*.json"))
SHARED = {"data": "made_up", "k": 2, "cohort": 6, "steps": 2, "rank": 1, "rate": 0.01}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    write_set(folder / "made_up.npz")
    write_set(folder / "joined.npz", joined=True)
    return folder


@pytest.fixture(scope="module")
def comparison(sets: Path, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    model, _ = make_model(tmp_path_factory.mktemp("model"), width=8)
    return Comparison(model, sets, 8, compiled=False)


def never_late() -> bool:
    return False


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_table_has_no_run_twice_and_tunes_a_rate_before_it_uses_it(path: Path) -> None:
    table = json.loads(path.read_text())
    listed = list(settings_of(table))
    assert len(set(listed)) == len(listed)
    done: list[dict[str, Any]] = []
    for setting in listed:
        if setting.rate is None:
            assert setting.data != table["tune_on"]
            assert best_rate(done, table["tune_on"], setting) > 0
        else:
            # Any loss will do: only what is there to choose from is looked at.
            done.append({**vars(setting), "used_rate": setting.rate, "loss": 1.0})


def test_all_selections_run_and_none_runs_twice(comparison: Comparison, tmp_path: Path) -> None:
    public = [parameter.detach().clone() for parameter in comparison.base.parameters()]
    path = tmp_path / "runs.jsonl"
    rows = [
        {"select": list(Select), "epsilon": [8.0, None]},
        {"select": list(Select), "method": "els", "epsilon": 8.0},
        {"rank": 0, "clip_norm": 0.1, "schedule": "constant", "warmup": 0},
    ]
    table = {"defaults": SHARED, "rows": rows}
    run_table(comparison, {**table, "rows": rows[:1]}, path, never_late)
    for _ in range(2):
        run_table(comparison, table, path, never_late)
    found = finished(path)
    assert len(found) == 3 * len(Select) + 1
    assert all(math.isfinite(row["loss"]) for row in found)
    assert all(row["rows"] > 0 for row in found)
    free = [row["loss"] for row in found if row["epsilon"] is None]
    assert len(set(free)) == len(Select), "selections train on different rows"
    for one, two in zip(public, comparison.base.parameters(), strict=True):
        assert torch.equal(one, two)


def test_runs_do_not_depend_on_those_before_and_late_ones_are_left_out(
    comparison: Comparison, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = {"defaults": SHARED, "rows": [{"seed": [1, 0]}]}
    run_table(comparison, table, tmp_path / "one.jsonl", never_late)
    run_table(comparison, {**table, "rows": [{"seed": 0}]}, tmp_path / "two.jsonl", never_late)
    first, alone = finished(tmp_path / "one.jsonl")[1], finished(tmp_path / "two.jsonl")[0]
    assert first["loss"] == alone["loss"]
    capsys.readouterr()
    run_table(comparison, table, tmp_path / "three.jsonl", lambda: True)
    assert capsys.readouterr().out.count("left_out") == 2
    assert finished(tmp_path / "three.jsonl") == []


def test_a_null_rate_is_the_best_one_of_the_same_recipe_and_epsilon() -> None:
    def row(rate: float, loss: float, **more: Any) -> dict[str, Any]:
        return {"data": "tune", "rate": rate, "used_rate": rate, "loss": loss, "rank": 1, **more}

    done = [
        row(0.1, 3.0, epsilon=8.0),
        row(0.2, 2.0, epsilon=8.0),
        row(0.3, 4.0, epsilon=1.0),
        row(0.4, 1.0, epsilon=None),
        row(0.5, 0.5, epsilon=8.0, clip_norm=0.1),
        row(0.6, 0.1, epsilon=8.0, schedule="constant"),
    ]
    for epsilon, expected in ((8.0, 0.2), (1.0, 0.3), (None, 0.4), (3.0, 0.2)):
        setting = Setting(data="other", rank=1, epsilon=epsilon, rate=None)
        assert best_rate(done, "tune", setting) == expected
    setting = Setting(data="other", rank=1, epsilon=1.0, clip_norm=0.1, rate=None)
    assert best_rate(done, "tune", setting) == 0.5


def test_compute_decides_the_cohort_and_more_users_only_the_noise(sets: Path) -> None:
    found = Set.read(sets / "made_up.npz")
    index = found.train.index()
    rows_a_user = np.minimum(np.diff(index.indptr), 2).mean()
    setting = Setting(data="made_up", k=2, compute=6, steps=3)
    plan = plan_of(setting, found, index)
    assert plan.divisor == pytest.approx(6 / rows_a_user)
    more = plan_of(Setting(data="made_up", k=2, compute=6, steps=3, times_users=10), found, index)
    assert more.divisor == plan.divisor
    # Ten times as many users and draws have the same rate. At the same delta they would have the
    # same noise on their sum, and a tenth of it on their mean; their delta is smaller.
    assert more.delta == pytest.approx(plan.delta * 10**-1.1)
    same = replace(more, delta=plan.delta, mark=None, noise=plan.noise).noise_stddev / 10
    assert same < more.noise_stddev < 2 * same
    assert str(more.statement()).startswith("HYPOTHETICAL")


def test_schedules_rise_and_fall_as_they_say() -> None:
    def rates(schedule: str, warmup: float) -> list[float]:
        setting = Setting(data="any", schedule=schedule, warmup=warmup, steps=10)
        return [share_of_rate(setting, step) for step in range(10)]

    assert rates("constant", 0) == [1.0] * 10
    assert rates("constant", 0.2)[:3] == [0.5, 1.0, 1.0]
    assert rates("linear", 0) == pytest.approx([1 - step / 10 for step in range(10)])
    cosine = rates("cosine", 0)
    assert cosine[0] == 1.0
    assert cosine[5] == pytest.approx(0.5)
    assert all(one > two > 0 for one, two in itertools.pairwise(cosine))


def test_joined_records_cannot_be_ranked(sets: Path) -> None:
    found = Set.read(sets / "joined.npz")
    secret = RunSecret.fixed_for_tests(0)
    with pytest.raises(InputError, match="which records"):
        found.contributions("longest", method="uls", k=2, length=8, secret=secret)
    assert found.contributions("random-chunk", method="uls", k=2, length=8, secret=secret)


def test_records_stay_whole_unless_they_are_joined() -> None:
    texts = [(["u"], list(range(1, 1 + size))) for size in (3, 12, 2000)] * 40
    apart = prepare.one_owner(texts, 0, 8, prepare.MOST_RECORDS, join=False)
    numbers, tokens = np.unique(apart["record_of_row"], return_inverse=True)
    lengths = np.bincount(tokens, weights=np.diff(apart["indptr"]))
    assert len(numbers) == prepare.MOST_RECORDS
    # An end is added, and a last row of a single token is dropped.
    assert set(lengths.tolist()) == {4.0, 13.0, float(prepare.MOST_TOKENS)}
    joined = prepare.one_owner(texts, 0, 8, 5, join=True)
    assert not joined["record_of_row"].any()
    assert np.diff(joined["indptr"]).tolist() == [8] * 5


BLOCKED = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("duckdb", "pyarrow", "pydantic"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
from reproductions.finetuning import compare, selections
compare.main({compare!r})
selections.main({selections!r})
"""


@pytest.mark.slow
def test_the_commands_run_where_arrow_duckdb_and_pydantic_are_not_installed(
    sets: Path, tmp_path: Path
) -> None:
    make_model(tmp_path / "model", width=8)
    tables = []
    for name, row in (("one", {"select": "longest"}), ("two", {"epsilon": None})):
        tables.append(str(tmp_path / f"{name}.json"))
        Path(tables[-1]).write_text(json.dumps({"defaults": SHARED, "rows": [row]}))
    model, out = str(tmp_path / "model"), tmp_path / "results"
    compare = [model, str(sets), "--length", "8", "--json", str(out), "--table", *tables]
    selections = [model, str(sets / "made_up.npz"), "--k", "2"]
    result = python(BLOCKED.format(compare=compare, selections=selections))
    assert result.returncode == 0, result.stderr
    assert [len(finished(out / f"{name}.jsonl")) for name in ("one", "two")] == [1, 1]
    assert '"mean_perplexity"' in result.stdout
