"""`userdp budget`: what was spent, by whom, what is left; and the looks that it counts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from cli_runner import userdp
from store_copies import COPIES
from stores import KEY, sentences
from userdp import Adjacency, Population, UserStore
from userdp.accounting import events
from userdp.budget.spending import NEW_START, NOT_PRIVATE
from userdp.cli.budget import BAR_WIDTH
from userdp.data.store import write_store
from userdp.prices.paid import read_paid

STEP = events.poisson_users_gaussian(user_sampling_prob=0.02, noise_multiplier=1.0)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    place = tmp_path / "store"

    def write(out: Path) -> None:
        write_store(sentences(users=6, records_per_user=2, seed=1, prefix="a"), out, key=KEY)

    COPIES.make("six users of the budget's tests", place, write)
    return place


def reserve(store: Path, run: str, steps: int, **options: Any) -> None:
    Population.of(UserStore.open(store)).reserve(
        run=run,
        what=f"training, {steps} steps",
        where=run,
        steps=steps,
        **{"event": events.repeated(STEP, steps), "adjacency": Adjacency.ADD_REMOVE} | options,
    )


def contents(store: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in store.parent.rglob("*") if path.is_file()}


def test_nothing_spent_is_told_and_nothing_is_written(store: Path) -> None:
    before = contents(store)
    found = userdp("budget", store, "--json").json
    assert found["spent_epsilon"] == 0
    assert (found["limit"], found["left"], found["entries"]) == (None, None, [])
    assert (found["delta"], found["problems"]) == (1e-6, [])
    shown = userdp("budget", store)
    assert "nothing was spent" in shown.out
    assert "epsilon=0 at delta=1e-06 (the default where no limit is set)" in shown.out
    assert contents(store) == before


def test_what_was_spent_is_the_composition_of_all_events(store: Path, tmp_path: Path) -> None:
    price = tmp_path / "paid.json"
    looked = userdp("quantile", store, "--epsilon", 1, "--out", price, "--json").json
    reserve(store, "first", 200)
    reserve(store, "second", 100, paid=[read_paid(price)])
    found = userdp("budget", store, "--json").json
    library = PLDAccountant(value_discretization_interval=1e-4)
    library.compose(STEP, 300)
    library.compose(dp_event.GaussianDpEvent(looked["event"]["noise_multiplier"]))
    assert found["spent_epsilon"] == pytest.approx(library.get_epsilon(1e-6), rel=1e-3)
    assert [(entry["what"], entry["run"]) for entry in found["entries"]] == [
        ("records per user, private 0.5 quantile", None),
        ("training, 200 steps", "first"),
        ("training, 100 steps", "second"),
    ]
    assert found["entries"][0]["epsilon"] == looked["epsilon"]
    at = userdp("budget", store, "--delta", 1e-3, "--json").json
    assert (at["delta"], at["spent_epsilon"] < found["spent_epsilon"]) == (1e-3, True)


def test_the_limit_is_set_raised_and_lowered(store: Path) -> None:
    reserve(store, "first", 200)
    found = userdp("budget", store, "--limit", 8, "--delta", 1e-5, "--json").json
    assert (found["limit"], found["delta"], found["limit_delta"]) == (8, 1e-5, 1e-5)
    assert 0 <= 8 - found["spent_epsilon"] - found["left"] <= 1e-6
    # The delta of the limit before holds until another is given; left is at the limit's delta.
    lower = userdp("budget", store, "--limit", 1, "--json").json
    assert (lower["limit"], lower["limit_delta"], lower["left"]) == (1, 1e-5, 0)
    other = userdp("budget", store, "--limit", 8, "--delta", 1e-5, "--json").json["left"]
    assert userdp("budget", store, "--delta", 1e-3, "--json").json["left"] == other


def test_a_person_sees_a_table_and_a_bar_that_never_flatters(store: Path) -> None:
    reserve(store, "a[red]b", 200)
    shown = userdp("budget", store, "--limit", 4, "--delta", 1e-6)
    assert "training, 200 steps (planned)" in shown.out
    assert "a[red]b" in shown.out
    spent = userdp("budget", store, "--json").json["spent_epsilon"]
    bar = shown.out[shown.out.index("[#") + 1 : shown.out.index("] left")]
    assert len(bar) == BAR_WIDTH
    assert bar.count("#") / BAR_WIDTH >= spent / 4 > (bar.count("#") - 1.01) / BAR_WIDTH
    assert "copies of the data elsewhere are not seen" in shown.out
    assert "\x1b" not in shown.out


@pytest.mark.parametrize(
    "options",
    [
        "--limit 0 --delta 1e-6",
        "--limit -1 --delta 1e-6",
        "--limit nan --delta 1e-6",
        "--limit inf --delta 1e-6",
        "--limit 1",
        "--limit 1 --delta 0",
        "--limit 1 --delta 1",
        "--delta -1e-6",
        "--delta nan",
        "--new",
    ],
)
def test_wrong_numbers_exit_with_2_and_change_nothing(store: Path, options: str) -> None:
    before = contents(store)
    result = userdp("budget", store, *options.split())
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert contents(store) == before


def test_what_is_no_store_exits_with_2(tmp_path: Path) -> None:
    assert userdp("budget", tmp_path).code == 2
    assert userdp("budget", tmp_path / "none", "--limit", 1, "--delta", 1e-6).code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_look_past_the_limit_exits_with_3_and_nothing_is_spent(
    store: Path, tmp_path: Path
) -> None:
    userdp("budget", store, "--limit", 1, "--delta", 1e-6)
    before = contents(store)
    price = tmp_path / "paid.json"
    refused = userdp("quantile", store, "--epsilon", 2, "--out", price, "--json")
    assert (refused.code, refused.out) == (3, "")
    assert "nothing was spent" in refused.err
    assert refused.err.count("\n") == 1
    assert contents(store) == before
    assert userdp("quantile", store, "--epsilon", 0.9, "--out", price).code == 0
    assert userdp("quantile", store, "--epsilon", 0.9).code == 3


def test_a_look_whose_price_cannot_be_written_is_not_paid_for(store: Path, tmp_path: Path) -> None:
    before = contents(store)
    refused = userdp("quantile", store, "--epsilon", 1, "--out", tmp_path / "nowhere" / "paid.json")
    assert refused.code == 2
    assert contents(store) == before


def test_a_paid_file_names_its_entry(store: Path, tmp_path: Path) -> None:
    price = tmp_path / "paid.json"
    looked = userdp("quantile", store, "--epsilon", 1, "--out", price, "--json").json
    (entry,) = userdp("budget", store, "--json").json["entries"]
    assert entry["entry"] == looked["entry"] == read_paid(price).entry
    written = json.loads(price.read_text())
    price.write_text(json.dumps(written | {"entry": 3}))
    assert userdp("train", _config(tmp_path, price), "--out", tmp_path / "run").code == 2


def _config(tmp_path: Path, price: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(
        f"""[data]
store = "{tmp_path}/store"
[model]
path = "{tmp_path}/model"
[privacy]
num_users = 6
expected_cohort_size = 3
clip_norm = 1.0
noise_multiplier = 1.0
delta = 1e-2
paid = ["{price}"]
[training]
steps = 3
"""
    )
    return path


def test_a_run_without_privacy_and_mixed_adjacencies_are_problems(store: Path) -> None:
    reserve(store, "first", 10)
    reserve(store, "second", 10, adjacency=Adjacency.REPLACE)
    found = userdp("budget", store, "--json").json
    assert found["spent_epsilon"] is None
    assert "cannot be added up" in found["problems"][0]
    assert "problem: releases under" in userdp("budget", store).out
    reserve(store, "third", 10, event=None)
    found = userdp("budget", store, "--limit", 3, "--delta", 1e-6, "--json").json
    assert (found["spent_epsilon"], found["left"], found["problems"]) == (None, 0, [NOT_PRIVATE])


def test_a_lost_budget_exits_with_2_until_a_new_start_is_declared(store: Path) -> None:
    reserve(store, "first", 10)
    shutil.rmtree(store.with_name("store.population"))
    for arguments in (("budget", store), ("quantile", store, "--epsilon", 1)):
        refused = userdp(*arguments)
        assert (refused.code, refused.err.count("\n")) == (2, 1)
        assert "--new" in refused.err
    found = userdp("budget", store, "--new", "--json")
    assert (found.json["cautions"], found.json["entries"]) == ([NEW_START], [])
    assert "not counted" in found.err
    assert userdp("quantile", store, "--epsilon", 1).code == 0
    assert userdp("budget", store, "--json").json["cautions"] == [NEW_START]


def test_a_damaged_budget_exits_with_2_and_one_line(store: Path) -> None:
    reserve(store, "first", 10)
    file = store.with_name("store.population") / "budget.jsonl"
    file.write_bytes(file.read_bytes().replace(b'"count": 10', b'"count": 1'))
    refused = userdp("budget", store)
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "line 2" in refused.err
