"""Trackers: which numbers they get, and that a missing package is refused in time."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import userdp
from userdp.errors import InputError
from userdp.prices.marks import Hypothetical
from userdp.training.trackers import TRACKERS, open_trackers
from userdp.training.validation import Validation

# All that a tracker may ever be told. A new name here is a decision about privacy.
PUBLIC = {"epsilon", "learning_rate", "clip_norm"} | {
    f"validation/{name}"
    for name in ("loss", "perplexity", "accuracy_top1", "mean_user_loss", "worst_decile_loss")
}


class Noted:
    """Notes what it is told."""

    def __init__(self, run: Path) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.is_closed = False
        Noted.last = self

    last: Noted

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.rows.append((step, dict(numbers)))

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def train(
    base_model: Path, train_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    monkeypatch.setitem(TRACKERS, "noted", Noted)
    monkeypatch.setattr("userdp.training.trackers.MODULES", {"noted": "math"})

    def run(**options: Any) -> Any:
        model, tokenizer = userdp.load_model(base_model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        plan = options.pop("plan", None) or userdp.Plan.sample_users(
            num_users=20,
            expected_cohort_size=5,
            group_size=2,
            steps=4,
            clip_norm=0.5,
            noise_multiplier=1.0,
            delta=1e-2,
        )
        return userdp.train(
            model,
            tokenizer,
            userdp.UserStore.open(train_store),
            plan,
            optimizer=optimizer,
            scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
            sequence_length=16,
            out=tmp_path / "run",
            **options,
        )

    return run


def test_a_tracker_gets_public_numbers_and_nothing_else(
    train: Callable[..., Any], held_out_store: Path
) -> None:
    validation = Validation(store=userdp.UserStore.open(held_out_store), every=2)
    run = train(trackers=["noted"], validation=validation)
    told = Noted.last
    assert told.is_closed
    assert [step for step, _ in told.rows] == [0, 1, 2, 3, 4]
    assert set().union(*(numbers for _, numbers in told.rows)) == PUBLIC
    by_step = dict(told.rows)
    # The rate with which the step was taken, not that of the next one.
    assert [by_step[step]["learning_rate"] for step in (1, 2, 3, 4)] == [1.0, 0.5, 0.25, 0.125]
    assert by_step[1]["clip_norm"] == 0.5
    for step in (1, 2, 3, 4):
        assert by_step[step]["epsilon"] == run.ledger.plan.epsilon(step)
    losses = {point.step: point.loss for point in run.validation}
    assert {s: n["validation/loss"] for s, n in told.rows if "validation/loss" in n} == losses


def test_a_curve_that_is_not_for_release_is_not_tracked(
    train: Callable[..., Any], held_out_store: Path
) -> None:
    validation = Validation(store=userdp.UserStore.open(held_out_store), every=1, secret=True)
    train(trackers=["noted"], validation=validation)
    names = set().union(*(numbers for _, numbers in Noted.last.rows))
    assert names == {"epsilon", "learning_rate", "clip_norm"}


def test_a_run_without_a_guarantee_has_no_epsilon(train: Callable[..., Any]) -> None:
    plan = userdp.Plan.sample_users(
        num_users=20,
        expected_cohort_size=5,
        group_size=2,
        steps=2,
        clip_norm=math.inf,
        noise_multiplier=0.0,
        delta=1e-2,
        non_private=True,
    )
    train(plan=plan, trackers=["noted"])
    assert [set(numbers) for _, numbers in Noted.last.rows] == [{"learning_rate"}] * 2


def test_a_marked_run_has_no_epsilon(train: Callable[..., Any]) -> None:
    plan = userdp.Plan.sample_users(
        num_users=20,
        expected_cohort_size=5,
        group_size=2,
        steps=2,
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-2,
        mark=Hypothetical(num_users=1_000, expected_groups=5),
    )
    train(plan=plan, trackers=["noted"])
    assert [set(numbers) for _, numbers in Noted.last.rows] == [{"learning_rate", "clip_norm"}] * 2


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_a_missing_package_is_named_before_anything_is_written(
    base_model: Path,
    train_store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    for module in ("torch.utils.tensorboard", "trackio", "wandb"):
        monkeypatch.setitem(sys.modules, module, None)
    model, tokenizer = userdp.load_model(base_model)
    plan = userdp.Plan.sample_users(
        num_users=20,
        expected_cohort_size=5,
        group_size=2,
        steps=1,
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-2,
    )
    store = userdp.UserStore.open(train_store)
    with pytest.raises(InputError, match=f"pip install {name}"):
        userdp.train(model, tokenizer, store, plan, out=tmp_path / "run", trackers=[name])
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match="give `out`"):
        userdp.train(model, tokenizer, store, plan, trackers=[name])


def test_each_package_is_called_as_it_expects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[str, Any, Any]] = []

    def note(name: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            called.append((name, given or named, named))
            return fake

        return call

    fake = types.SimpleNamespace(
        add_scalar=note("add_scalar"), close=note("close"), log=note("log"), finish=note("finish")
    )
    modules = {
        "torch.utils.tensorboard": types.SimpleNamespace(SummaryWriter=note("SummaryWriter")),
        "wandb": types.SimpleNamespace(init=note("init"), Settings=dict),
        "trackio": types.SimpleNamespace(init=note("init"), log=note("log"), finish=note("finish")),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    found: dict[str, list[Any]] = {}
    for name in ("tensorboard", "trackio", "wandb"):
        called.clear()
        tracker = TRACKERS[name](tmp_path / "run")
        tracker.log({"epsilon": 1.5}, 3)
        tracker.close()
        found[name] = list(called)
    assert [name for name, *_ in found["tensorboard"]] == ["SummaryWriter", "add_scalar", "close"]
    assert found["tensorboard"][1][1] == ("epsilon", 1.5, 3)
    assert found["tensorboard"][1][2] == {"walltime": 3.0}, "how long a step took is secret"
    assert found["wandb"][0][1]["mode"] == "offline"
    assert found["wandb"][1][1] == ({"epsilon": 1.5},)
    assert [name for name, *_ in found["trackio"]] == ["init", "log", "finish"]
    assert found["trackio"][0][1]["auto_log_gpu"] is False
    assert found["wandb"][0][1]["settings"]["x_disable_stats"] is True


def told(tracker: str, run: Path) -> None:
    """Tell a real tracker two steps."""
    with open_trackers([tracker], run) as (opened,):
        for step in (1, 2):
            opened.log({"epsilon": 0.5 * step}, step)


def test_tensorboard_reads_the_steps_and_no_time(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told("tensorboard", tmp_path)
    found = EventAccumulator(str(tmp_path / "trackers" / "tensorboard"))
    found.Reload()
    rows = [(row.step, row.value, row.wall_time) for row in found.Scalars("epsilon")]
    assert rows == [(1, 0.5, 1.0), (2, 1.0, 2.0)]


def test_weights_and_biases_stays_offline_in_the_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    told("wandb", tmp_path)
    (run,) = (tmp_path / "trackers" / "wandb").glob("offline-run-*")
    assert list(run.glob("*.wandb"))


def test_trackio_keeps_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "database"))
    pytest.importorskip("trackio")
    told("trackio", tmp_path / "run")
    assert any(path.is_file() for path in (tmp_path / "database").rglob("userdp*"))
