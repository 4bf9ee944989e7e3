"""A run that ends before its last planned step costs what its plan costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import userdp
from tiny import make_model, make_store
from userdp.errors import InputError
from userdp.holding import WholeWeights
from userdp.ledger.book import Ledger
from userdp.runs.check import check_run
from userdp.runs.checkpoints import Saving
from userdp.training.loop import Run

PLAN = userdp.Plan.sample_users(
    num_users=12,
    expected_cohort_size=4,
    group_size=2,
    steps=5,
    clip_norm=1.0,
    noise_multiplier=1.0,
    delta=1e-3,
)


class After:
    """Asks for the end after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done = steps, 0

    def on_step(self, steps: int) -> None:
        self.done = steps

    def __call__(self) -> bool:
        return self.done >= self.steps


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> userdp.UserStore:
    return make_store(tmp_path_factory.mktemp("early") / "store", [3] * 12)


def run(
    store: userdp.UserStore, tmp_path: Path, *, out: Path | None, ends: int, **more: Any
) -> Run:
    model, tokenizer = make_model(tmp_path / "model")
    asked = After(ends)
    return userdp.train(
        model,
        tokenizer,
        store,
        PLAN,
        sequence_length=64,
        out=out,
        stop_early=asked,
        on_step=asked.on_step,
        **more,
    )


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_every_planned_step_is_charged_and_the_statement_says_when_it_ended(
    store: userdp.UserStore, tmp_path: Path
) -> None:
    done = run(store, tmp_path, out=tmp_path / "run", ends=2)
    assert done.ledger.steps == 5
    assert done.statement.guarantee
    assert done.statement.epsilon == PLAN.epsilon()
    told = [one for one in done.statement.cautions if "stopped after 2 of 5 planned steps" in one]
    assert len(told) == 1
    assert check_run(tmp_path / "run").ok
    # Whoever asks to go on gets the weights of the end.
    again = run(store, tmp_path, out=tmp_path / "run", ends=2, resume=True)
    assert torch.equal(weights(again.model), weights(done.model))


def test_an_end_after_the_last_step_is_no_early_end(
    store: userdp.UserStore, tmp_path: Path
) -> None:
    done = run(store, tmp_path, out=None, ends=5)
    assert done.ledger.steps == 5
    assert not any("stopped after" in one for one in done.statement.cautions)


def test_a_machine_that_fails_while_the_rest_is_charged_repeats_nothing_else(
    store: userdp.UserStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    charge = Ledger.charge_step

    def breaks(self: Ledger, *, of_rest: bool = False) -> None:
        if self.steps == 4:
            raise RuntimeError("power cut")
        charge(self, of_rest=of_rest)

    saving = Saving(every_steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "charge_step", breaks)
        with pytest.raises(RuntimeError, match="power cut"):
            run(store, tmp_path, out=tmp_path / "run", ends=2, saving=saving)
    assert Ledger.read(tmp_path / "run" / "ledger.jsonl").steps == 4
    # The run ends where it ended, whatever is asked now.
    done = run(store, tmp_path, out=tmp_path / "run", ends=4, saving=saving, resume=True)
    assert done.ledger.steps == 5
    assert any("stopped after 2 of 5 planned steps" in one for one in done.statement.cautions)
    assert check_run(tmp_path / "run").ok


@pytest.mark.parametrize("charged", [2, 3, 4, 5])
def test_the_rest_of_a_run_that_ended_early_is_never_taken(
    charged: int, store: userdp.UserStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its rows are there already: nothing would tell how often it was taken, each time with new
    # noise.
    charge, taken = Ledger.charge_step, list[int]()
    released = WholeWeights.set_gradients

    def breaks(self: Ledger, *, of_rest: bool = False) -> None:
        if self.steps == charged:
            raise RuntimeError("power cut")
        charge(self, of_rest=of_rest)

    def cut(*given: Any, **named: Any) -> None:
        raise RuntimeError("power cut")

    def counted(self: WholeWeights, total: Any, release: Any) -> None:
        taken.append(release.step)
        released(self, total, release)

    options: dict[str, Any] = {"out": tmp_path / "run", "saving": Saving(every_steps=100)}
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "charge_step", breaks)
        patch.setattr(Ledger, "finish", cut)
        with pytest.raises(RuntimeError, match="power cut"):
            run(store, tmp_path, ends=2, **options)
    monkeypatch.setattr(WholeWeights, "set_gradients", counted)
    # Where none of the rest was charged, the run is asked again.
    ends = 2 if charged == 2 else 5
    done = run(store, tmp_path, ends=ends, resume=True, **options)
    # From the beginning, or from the checkpoint that was saved at the end.
    assert taken == ([] if charged == 5 else [0, 1])
    assert done.ledger.steps == 5
    assert any("stopped after 2 of 5 planned steps" in one for one in done.statement.cautions)
    assert check_run(tmp_path / "run").ok


def test_a_dry_run_that_was_stopped_is_not_trained(
    store: userdp.UserStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    charge = Ledger.charge_step

    def breaks(self: Ledger, *, of_rest: bool = False) -> None:
        if self.steps == 3:
            raise RuntimeError("power cut")
        charge(self, of_rest=of_rest)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "charge_step", breaks)
        with pytest.raises(RuntimeError, match="power cut"):
            run(store, tmp_path, out=tmp_path / "run", ends=9, dry_run=True)
    with pytest.raises(InputError, match="is a dry run that was stopped"):
        run(store, tmp_path, out=tmp_path / "run", ends=9, resume=True)
