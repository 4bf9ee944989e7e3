"""The validation curve: right numbers, kept where they may be, and without effect on training."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import userdp
from stores import sentences
from userdp.data.store import write_store
from userdp.errors import InputError
from userdp.evaluation import evaluate_store
from userdp.files.interrupts import InterruptedRunError
from userdp.report.write import write_report
from userdp.runs.files import model_files
from userdp.runs.validation_curve import Point, read_points, released_curve
from userdp.streams import RunSecret
from userdp.training.validation import Validation


@pytest.fixture
def train(base_model: Path, train_store: Path) -> Callable[..., Any]:
    """Trains a tiny model for six steps with a fixed seed, each time the same."""

    def run(**options: Any) -> Any:
        plan = userdp.Plan.sample_users(
            num_users=20,
            expected_cohort_size=5,
            group_size=2,
            steps=6,
            clip_norm=1.0,
            noise_multiplier=1.0,
            delta=1e-2,
        )
        model, tokenizer = userdp.load_model(base_model)
        options.setdefault("secret", RunSecret.fixed_for_tests(3))
        done = userdp.train(
            model,
            tokenizer,
            userdp.UserStore.open(train_store),
            plan,
            sequence_length=16,
            saving=userdp.Saving(every_steps=1),
            **options,
        )
        return model, done

    return run


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_weights_are_the_same_bit_for_bit_with_and_without_validation(
    train: Callable[..., Any], held_out_store: Path
) -> None:
    store = userdp.UserStore.open(held_out_store)
    alone, _ = train()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    watched, run = train(validation=Validation(store=store, every=1))
    assert torch.equal(weights(alone), weights(watched))
    assert torch.equal(torch.get_rng_state(), before)
    assert [point.step for point in run.validation] == [0, 1, 2, 3, 4, 5, 6]


def test_first_and_last_point_are_the_losses_of_the_model_before_and_after(
    train: Callable[..., Any], base_model: Path, held_out_store: Path
) -> None:
    store = userdp.UserStore.open(held_out_store)
    told: list[Point] = []
    after, run = train(validation=Validation(store=store, every=4, on_point=told.append))
    assert [point.step for point in run.validation] == [0, 4, 6]
    assert told == list(run.validation)
    before, tokenizer = userdp.load_model(base_model)
    for model, point in ((before, run.validation[0]), (after, run.validation[-1])):
        found = evaluate_store(model, tokenizer, store, sequence_length=16)
        assert point.loss == found.loss
        assert point.worst_decile_loss == found.worst_decile_loss
        assert (point.tokens, point.users) == (found.tokens, 5)
    assert run.validation[0].loss != run.validation[-1].loss


def stop_after(last: int) -> Callable[[int], None]:
    """Sends Ctrl-C after the given step."""
    return lambda done: os.kill(os.getpid(), signal.SIGINT) if done == last else None


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_run_that_goes_on_has_each_point_once(
    train: Callable[..., Any],
    held_out_store: Path,
    tmp_path: Path,
    is_killed: bool,
) -> None:
    validation = Validation(store=userdp.UserStore.open(held_out_store), every=2)
    _, whole = train(validation=validation, out=tmp_path / "whole")
    out = tmp_path / "run"
    with pytest.raises(InterruptedRunError):
        train(validation=validation, out=out, on_step=stop_after(4))
    if is_killed:
        # As after a kill: the last checkpoint is older than the last point.
        for step in (3, 4):
            for path in (out / "checkpoints").glob(f"step-*{step}"):
                os.rename(path, tmp_path / path.name)
    assert [point.step for point in read_points(out / "validation.jsonl")] == [0, 2, 4]
    _, run = train(validation=validation, out=out, resume=True)
    assert run.validation == whole.validation
    assert (out / "validation.jsonl").read_bytes() == (
        tmp_path / "whole" / "validation.jsonl"
    ).read_bytes()
    # A finished run tells its points again.
    _, again = train(validation=validation, out=out, resume=True)
    assert again.validation == whole.validation


def test_released_numbers_are_not_called_secret_later(
    train: Callable[..., Any], held_out_store: Path, tmp_path: Path
) -> None:
    store = userdp.UserStore.open(held_out_store)
    out = tmp_path / "run"
    with pytest.raises(InterruptedRunError):
        train(validation=Validation(store=store, every=2), out=out, on_step=stop_after(3))
    secret = Validation(store=store, every=2, secret=True)
    with pytest.raises(InputError, match=r"validation\.jsonl has released numbers of these people"):
        train(validation=secret, out=out, resume=True)
    (out / "validation.jsonl").unlink()
    _, run = train(validation=secret, out=out, resume=True)
    assert run.validation
    assert not (out / "validation.jsonl").exists()


def _numbers(points: Sequence[Point]) -> set[str]:
    return {str(point.loss) for point in points}


def _told(run: Path) -> str:
    """Everything that a run's files say outside its secrets and checkpoints."""
    return "".join(
        path.read_bytes().decode(errors="replace")
        for path in sorted(run.rglob("*"))
        if path.is_file() and not {"secret", "checkpoints"} & set(path.parts)
    )


@pytest.mark.parametrize("why", ["declared", "unchecked"])
def test_numbers_that_are_not_for_release_are_in_the_secrets_alone(
    train: Callable[..., Any], held_out_store: Path, tmp_path: Path, why: str
) -> None:
    place = held_out_store
    if why == "unchecked":
        # Ids under another key cannot be compared with those of the training store.
        place = tmp_path / "other"
        write_store(
            sentences(users=3, records_per_user=2, seed=5, prefix="c"), place, key=b"y" * 32
        )
    validation = Validation(store=userdp.UserStore.open(place), every=2, secret=why == "declared")
    out = tmp_path / "run"
    _, run = train(validation=validation, out=out, secret=None)
    kept = out / "secret" / "validation.jsonl"
    assert read_points(kept) == list(run.validation)
    assert kept.stat().st_mode & 0o777 == 0o600
    assert released_curve(out) == []
    assert not (out / "validation.jsonl").exists()
    write_report(out)
    said = _told(out)
    for number in _numbers(run.validation):
        assert number[:7] not in said
    assert "Not measured, or not for release." in (out / "MODEL_CARD.md").read_text()


def test_training_users_are_refused_before_anything_is_written(
    train: Callable[..., Any], train_store: Path, tmp_path: Path
) -> None:
    validation = Validation(store=userdp.UserStore.open(train_store))
    with pytest.raises(InputError, match="20 of its users are training users too"):
        train(validation=validation, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_points_that_are_damaged_are_refused_with_their_line(tmp_path: Path) -> None:
    good = {
        "step": 0,
        "data": "x",
        "loss": 1.5,
        "perplexity": 4.5,
        "accuracy_top1": 0.1,
        "mean_user_loss": 1.0,
        "worst_decile_loss": None,
        "tokens": 3,
        "users": 1,
    }
    place = tmp_path / "validation.jsonl"
    place.write_text(json.dumps(good) + "\n")
    assert read_points(place) == [Point(**good)]
    for change in ({"step": "0"}, {"loss": "low"}, {"more": 1}, {"users": True}):
        place.write_text(json.dumps(good) + "\n" + json.dumps(good | change) + "\n")
        with pytest.raises(InputError, match="line 2"):
            read_points(place)


def test_the_model_is_the_one_of_the_closing_row_after_a_report(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    train(out=out)
    before = model_files(out / "model")
    write_report(out)
    assert model_files(out / "model") == before
    assert (out / "model" / "README.md").read_text() == (out / "MODEL_CARD.md").read_text()
