"""What `userdp plan` says can be written into a configuration, and `train` takes it as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cli_runner import answer, userdp
from stores import KEY
from userdp.cli import plan_copy
from userdp.cli.plan_records import Known
from userdp.config.file import load_config
from userdp.data.record import Record
from userdp.data.store import write_store
from userdp.errors import InputError
from userdp.planner.norms import same_direction
from userdp.planner.search import ULS, Candidate, Setting
from userdp.units import Adjacency

OPTIONS = ("--epsilon", 8, "--steps", 10, "--noise-memory", 0)
PUBLIC = ("--users", 400, "--records-per-user", 8, *OPTIONS)


@pytest.fixture
def shared_records(tmp_path: Path) -> Path:
    """A store in which most records have two owners."""
    rng = np.random.default_rng(0)
    records = [
        Record(
            f"text {number}",
            tuple(f"u{user}" for user in rng.choice(30, 1 + (number % 3 > 0), False)),
            "",
        )
        for number in range(120)
    ]
    write_store(records, tmp_path / "store", key=KEY)
    return tmp_path / "store"


@pytest.mark.parametrize("adjacency", [None, "fixed-graph-replace"])
def test_with_several_owners_the_plan_is_the_one_that_train_makes(
    shared_records: Path, tmp_path: Path, config_file: Callable[..., Path], adjacency: str | None
) -> None:
    chosen = ("--adjacency", adjacency) if adjacency else ()
    told = answer("plan", shared_records, *OPTIONS, *chosen)
    assert {one["method"] for one in told["candidates"]} == {"ELS"}
    assert told["adjacency"] == (adjacency or "fixed-graph-zero-out")
    # Who owns what is public under this adjacency.
    assert told["peeked"] == []
    bound = ("--max-records-per-user", told["max_records_per_user"])
    kept = answer("bound", shared_records, *bound, "--out", tmp_path / "selection.npz")
    assert kept["size"] == told["num_records"]
    keys = "\n".join(f"{key} = {value!r}" for key, value in told["configuration"].items())
    path = config_file(privacy=f"epsilon = 8.0\ndelta = {told['delta']}\n{keys}")
    text = path.read_text().replace("expected_cohort_size = 5\ngroup_size = 2\n", "")
    text = text.replace("num_users = 20", "num_users = 30").replace("steps = 4", "steps = 10")
    store = text.split('store = "')[1].split('"')[0]
    text = text.replace(f'store = "{store}"', f'store = "{shared_records}"', 1)
    text = text.replace("[data]\n", f'[data]\nselection = "{tmp_path}/selection.npz"\n')
    path.write_text(text)
    plan = load_config(path).plan()
    assert plan.noise.noise_multiplier == pytest.approx(told["noise_multiplier"], rel=1e-3)
    assert plan.sampler.group_size == told["group_size"]
    assert plan.divisor == told["cohort_size"]


def test_several_owners_without_a_fixed_graph_are_refused_as_train_refuses_them(
    shared_records: Path,
) -> None:
    with pytest.raises(InputError, match=r"have several owners.*Use fixed-graph-zero-out"):
        answer("plan", shared_records, *OPTIONS, "--adjacency", "add-remove")
    with pytest.raises(InputError, match="leave --model out"):
        answer("plan", shared_records, *OPTIONS, "--model", "any")


def test_under_a_fixed_graph_what_has_no_price_is_left_out() -> None:
    told = answer("plan", *PUBLIC, "--adjacency", "fixed-graph-zero-out", "--times-users", 10)
    assert [one["method"] for one in told["candidates"]] == ["ELS"]
    assert told["configuration"]["unit"] == "record"
    assert any("give the store" in reason for reason in told["reasons"])


def test_plan_refuses_and_cautions_as_train_does() -> None:
    refused = userdp("plan", *PUBLIC, "--delta", 0.1)
    assert refused.code == 2
    assert "delta=0.1 is above 1/num_users=0.0025" in refused.err
    few = ("--steps", 1, "--compute", 2)
    result = userdp("plan", *PUBLIC, *few, "--json")
    assert "caution: num_users=400 is far from" in result.err
    assert any("hardly anybody takes part" in caution for caution in result.json["cautions"])
    assert answer("plan", *PUBLIC)["cautions"] == []


def test_plan_says_what_to_copy_and_how_the_defaults_differ() -> None:
    told = userdp("plan", *PUBLIC, "--compute", 128, "--epsilon", 20).out
    assert 'unit = "user", expected_cohort_size = 128, group_size = 1: the least' in told
    # N / 20 users, and at least 32, with 4 records each.
    assert "left out, `train` samples 32 users a step with group_size = 4: about 128" in told
    assert "raise group_size alone" in told


def test_plan_says_so_where_the_defaults_are_the_best() -> None:
    setting = Setting(
        num_users=400,
        group_size_els=8,
        epsilon=8.0,
        delta=1e-3,
        steps=10,
        compute=128,
    )
    best = Candidate(
        method=ULS,
        group_size=4,
        cohort_size=32,
        rate=0.08,
        steps=10,
        noise_multiplier=1.0,
        noise_stddev=1.0,
    )
    public = Known(num_users=400, per_user=8, adjacency=Adjacency.ADD_REMOVE, peeked=[])
    line, beside = plan_copy.in_words(setting, best, public, same_direction())
    assert line.endswith("group_size = 4; the same is taken where they are left out")
    assert "[training] steps = 10" in beside
