"""Numbers of other people: where they go, what they are called, and what the report shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_llama import texts

from userdp import InputError, UserDPTrainer
from userdp.report.write import write_report
from userdp.runs.validation_curve import PUBLIC, SECRET, read_points

pytest.importorskip("accelerate", reason="TrainingArguments needs accelerate")

OTHERS = texts(5, prefix="other")
EVERY_TWO = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}


class Told(transformers.TrainerCallback):
    """Keeps every number that it is told."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.names: set[str] = set()

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.events.append("evaluate")
        self.names |= given["metrics"].keys()

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.names |= given["logs"].keys()


def test_the_curve_of_a_trainer_is_in_its_run_its_report_and_its_card(
    make: Callable[..., UserDPTrainer], tmp_path: Path
) -> None:
    trainer = make(eval_dataset=OTHERS, arguments=EVERY_TWO)
    trainer.train()
    run = tmp_path / "out" / "userdp" / "run"
    assert trainer.run is not None
    assert [point.step for point in trainer.run.validation] == [0, 2, 4]
    assert tuple(read_points(run / PUBLIC)) == trainer.run.validation
    logged = {e["step"]: e for e in trainer.state.log_history if "eval_loss" in e}
    for point in trainer.run.validation[1:]:
        entry = logged[point.step]
        assert (entry["eval_loss"], entry["eval_mean_user_loss"]) == (
            point.loss,
            point.mean_user_loss,
        )
        assert entry["eval_worst_decile_loss"] == point.worst_decile_loss
    files = write_report(run)
    assert "Not measured" not in files.card.read_text()
    assert "What it learned" in files.html.read_text()


def test_numbers_before_and_after_need_no_strategy(make: Callable[..., UserDPTrainer]) -> None:
    trainer = make(eval_dataset=OTHERS)
    trainer.train()
    assert trainer.run is not None
    assert [point.step for point in trainer.run.validation] == [0, 4]


def test_a_private_evaluation_tells_nobody_but_the_terminal(
    make: Callable[..., UserDPTrainer],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told, out = Told(), tmp_path / "out"
    trainer = make(
        eval_dataset=OTHERS,
        eval_is_private=True,
        callbacks=[told],
        arguments=EVERY_TWO | {"eval_on_start": True},
    )
    trainer.train()
    own = trainer.evaluate()
    trainer.log_metrics("eval", own)
    printed = capsys.readouterr()
    assert told.events == []
    assert not any("eval" in name for name in told.names)
    assert "loss" not in printed.out
    assert "step 2: held-out loss" in printed.err
    assert "eval: eval_loss = " in printed.err
    for write in (lambda: trainer.save_metrics("eval", own), lambda: trainer.log(own)):
        with pytest.raises(InputError, match="eval_is_private=True: these numbers are not for"):
            write()
    trainer.save_state()
    run = out / "userdp" / "run"
    points = read_points(run / SECRET)
    assert [point.step for point in points] == [0, 2, 4]
    assert not (run / PUBLIC).exists()
    write_report(run)
    hidden = {str(number) for point in points for number in (point.loss, point.worst_decile_loss)}
    for file in out.rglob("*"):
        if file.is_file() and "secret" not in file.parts and file.suffix != ".safetensors":
            content = file.read_bytes().decode(errors="replace")
            assert "eval_loss" not in content, file
            assert not any(number in content for number in hidden), file
    assert "Not measured, or not for release" in (run / "MODEL_CARD.md").read_text()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"arguments": EVERY_TWO | {"metric_for_best_model": "loss"}}, "metric_for_best_model="),
        ({"callbacks": [transformers.EarlyStoppingCallback()]}, "EarlyStoppingCallback with"),
    ],
)
def test_nothing_decides_by_numbers_that_are_not_for_release(
    make: Callable[..., UserDPTrainer], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=f"{message}.*not for release"):
        make(eval_dataset=OTHERS, eval_is_private=True, **given)
    trainer = make(eval_dataset=OTHERS, eval_is_private=True)
    with pytest.raises(InputError, match="EarlyStoppingCallback with"):
        trainer.add_callback(transformers.EarlyStoppingCallback)


def test_several_datasets_have_numbers_of_their_own(make: Callable[..., UserDPTrainer]) -> None:
    told = Told()
    named = {"near": OTHERS, "far": texts(4, prefix="far", seed=3)}
    trainer = make(
        eval_dataset=named,
        callbacks=[told],
        arguments=EVERY_TWO
        | {"metric_for_best_model": "eval_far_loss", "greater_is_better": False},
    )
    trainer.train()
    assert told.events == ["evaluate"] * 4
    assert {"eval_near_loss", "eval_far_loss", "eval_far_worst_decile_loss"} <= told.names
    assert trainer.state.best_metric is not None
    assert trainer.evaluate().keys() >= {"eval_near_loss", "eval_far_loss"}
    assert trainer.evaluate({"x": OTHERS}, None, "test").keys() >= {"test_x_loss"}
    with pytest.raises(InputError, match="has training users"):
        make(eval_dataset={"near": OTHERS, "own": texts(3)})


def test_the_best_of_a_number_that_is_not_measured_is_refused(
    make: Callable[..., UserDPTrainer],
) -> None:
    with pytest.raises(InputError, match="'f1' is not measured here: take one of eval_loss, "):
        make(eval_dataset=OTHERS, arguments=EVERY_TWO | {"metric_for_best_model": "f1"})


def test_a_run_that_goes_on_has_each_point_once(
    make: Callable[..., UserDPTrainer], tmp_path: Path
) -> None:
    class Fails(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 3:
                raise RuntimeError("the machine is gone")

    arguments = EVERY_TWO | {"eval_on_start": True}
    with pytest.raises(RuntimeError, match="machine is gone"):
        make(eval_dataset=OTHERS, callbacks=[Fails()], arguments=arguments).train()
    trainer = make(eval_dataset=OTHERS, arguments=arguments)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.run is not None
    assert [point.step for point in trainer.run.validation] == [0, 2, 4]
    told = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    measured = [e["step"] for e in told["log_history"] if "eval_loss" in e]
    assert measured == [0, 2, 4]


def test_people_who_cannot_be_compared_are_in_no_report(
    make: Callable[..., UserDPTrainer], tmp_path: Path
) -> None:
    public = [{"text": "red green blue"}] * 3
    make(eval_dataset=public, eval_is_public=True, arguments=EVERY_TWO).train()
    run = tmp_path / "out" / "userdp" / "run"
    assert read_points(run / SECRET)
    assert not (run / PUBLIC).exists()
