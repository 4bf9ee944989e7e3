"""What scripts call beside training works or is refused by name, and so is every argument."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import transformers
from tiny_llama import texts

from userdp import InputError, UserDPTrainer
from userdp.trainer.surface import REFUSED_GIVEN, REFUSED_NAMES

pytest.importorskip("accelerate", reason="TrainingArguments needs accelerate")

# Names of a Trainer that this one has neither as its own nor in the table: they are of no use to a
# script, or steps of the loop that Trainer makes.
INNER = {
    *("autocast_smart_context_manager", "call_model_init", "compute_loss_context_manager"),
    *("create_accelerator_and_postprocess", "end", "get_cp_size", "get_decay_parameter_names"),
    *("get_learning_rates", "get_num_trainable_parameters", "get_optimizer_cls_and_kwargs"),
    *("get_optimizer_group", "get_sp_size", "get_total_train_batch_size", "get_tp_size"),
    *("init_hf_repo", "loss_is_scaled_for_ga", "metrics_format", "set_initial_training_values"),
    "store_flos",
}


def test_every_method_of_a_trainer_is_offered_or_refused_by_name(
    make: Callable[..., UserDPTrainer],
) -> None:
    trainer = make()
    for name in dir(transformers.Trainer):
        if not name.startswith("_") and name not in INNER:
            assert name in REFUSED_NAMES or hasattr(trainer, name), name
    for name in REFUSED_NAMES:
        assert not hasattr(trainer, name), name
        with pytest.raises(InputError, match=rf"UserDPTrainer\.{name}: \w+.*[^.]\.$"):
            getattr(trainer, name)
    with pytest.raises(AttributeError, match="no attribute 'tokeniser'"):
        _ = trainer.tokeniser


@pytest.mark.parametrize(
    "name", ["compute_loss", "get_train_dataloader", "_inner_training_loop", "evaluate", "log"]
)
def test_a_subclass_does_not_replace_what_is_never_called(name: str) -> None:
    mixin = type("Mixin", (), {name: lambda self: None})
    for bases, own in (((UserDPTrainer,), {name: lambda self: None}), ((mixin, UserDPTrainer), {})):
        with pytest.raises(InputError, match=rf"Mine\.{name}: \w+"):
            type("Mine", bases, own)


def test_a_subclass_may_add_to_what_scripts_call() -> None:
    class Mine(UserDPTrainer):
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **given)

        def train(self, *args: Any, **given: Any) -> Any:
            return super().train(*args, **given)

        def helper(self) -> None: ...

    assert issubclass(Mine, UserDPTrainer)


def test_what_a_trainer_is_made_from_is_not_replaced(make: Callable[..., UserDPTrainer]) -> None:
    trainer = make()
    for name in ("model", "plan", "optimizer", "train_dataset", "state"):
        with pytest.raises(InputError, match=rf"UserDPTrainer\.{name} cannot be replaced"):
            setattr(trainer, name, None)
    with pytest.raises(InputError, match=r"UserDPTrainer\.compute_loss: it is inside of a step"):
        trainer.compute_loss = lambda model, inputs: 0
    trainer.own = 1


def test_methods_of_a_trainer_are_not_replaced(make: Callable[..., UserDPTrainer]) -> None:
    trainer = make()
    for name in ("evaluate", "log", "save_model"):
        with pytest.raises(InputError, match="the loop does not call it"):
            setattr(trainer, name, lambda *_: None)


def test_metrics_may_hold_words(
    make: Callable[..., UserDPTrainer], capsys: pytest.CaptureFixture[str]
) -> None:
    make().log_metrics("eval", {"eval_loss": 1.0, "note": "short"})
    assert capsys.readouterr().out == "eval: eval_loss = 1\neval: note = short\n"


def test_every_argument_of_a_trainer_is_taken_or_refused_by_name(
    make: Callable[..., UserDPTrainer],
) -> None:
    kinds: list[Any] = [transformers.Trainer]
    if importlib.util.find_spec("trl"):
        kinds.append(importlib.import_module("trl").SFTTrainer)
    own = inspect.signature(UserDPTrainer).parameters
    for kind in kinds:
        for name in inspect.signature(kind).parameters:
            assert name in own or name in REFUSED_GIVEN, name
    for name in REFUSED_GIVEN:
        with pytest.raises(InputError, match=rf"^{name}: "):
            make(**{name: lambda: None})
    make(model_init=None, quantization_config=None)
    with pytest.raises(TypeError, match=r"no argument 'epsilom'. Did you mean 'epsilon'\?"):
        make(epsilom=1.0)


def test_the_usual_end_of_a_script_works(make: Callable[..., UserDPTrainer]) -> None:
    train, others = texts(24), texts(4, prefix="other")
    trainer = make(train_dataset=train, eval_dataset=others)
    done = trainer.train()
    assert (trainer.train_dataset, trainer.eval_dataset) == (train, others)
    assert trainer.is_world_process_zero()
    assert trainer.is_local_process_zero()
    trainer.log({"own": 1.0})
    assert trainer.state.log_history[-1]["own"] == 1.0
    trainer.save_metrics("train", done.metrics)
    trainer.save_state()
    trainer.create_model_card(model_name="mine", tags=["a"])
    found = trainer.pop_callback(transformers.PrinterCallback)
    assert isinstance(found, transformers.PrinterCallback)
