"""What scripts do with a `Trainer` beside training, and what cannot be had of a private run.

Names that are not offered raise an error that is an `AttributeError`, too: `hasattr` says no.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import transformers
from transformers.trainer_callback import CallbackHandler

from userdp.errors import InputError
from userdp.files.durable import write_file
from userdp.trainer.loop import Loop, Metrics, callbacks_of
from userdp.trainer.measuring import Measuring, refuse_decisions

_LOADER = (
    "it gives batches of several users, and who takes part in a step is secret: leave it out; a "
    "loop of your own is userdp.PrivateStep"
)
_EVALUATION_LOOP = "take evaluate(dataset), or the trained model: trainer.model"
_INSIDE = "it is inside of a step, where gradients have no noise yet: leave it out"
_GIVEN = "it is made from the arguments: give optimizers=(optimizer, scheduler) instead"
_SEARCH = (
    "each trial would be a run on the same people, and all of them are paid for: train each with "
    "store= of the same place, and let `userdp budget` add them up"
)
# Attributes and methods of a `Trainer` that are refused, and why.
REFUSED_NAMES = {
    "accelerator": "processes share out the users themselves, without accelerate: take trainer."
    "args.device for the device, and trainer.is_world_process_zero() for the first process",
    "predict": "its predictions are numbers of single records: measure with evaluate(dataset), or "
    "let the trained model predict, trainer.model, and keep what it says of training users secret",
    "get_train_dataloader": _LOADER,
    "get_batch_samples": _LOADER,
    **dict.fromkeys(("get_eval_dataloader", "get_test_dataloader"), _EVALUATION_LOOP),
    **dict.fromkeys(("evaluation_loop", "prediction_step"), _EVALUATION_LOOP),
    **dict.fromkeys(("training_step", "compute_loss", "model_wrapped"), _INSIDE),
    **dict.fromkeys(("create_optimizer", "create_scheduler"), _GIVEN),
    "create_optimizer_and_scheduler": _GIVEN,
    "hyperparameter_search": _SEARCH,
    "floating_point_ops": "it counts the tokens of training users, which is secret: leave it out",
    "num_examples": "how many records and users there are is secret: take trainer.plan.num_users",
    "data_collator": "rows are made here, and none mixes users: leave it out",
    "tokenizer": "take trainer.processing_class",
}
# Methods of a `Trainer` that a subclass may replace: scripts call them, and the loop does not.
FREE = {"train", "add_callback", "pop_callback", "remove_callback", "create_model_card"}
FREE |= {"push_to_hub", "log_metrics", "save_metrics", "save_state"}
FREE |= {"is_world_process_zero", "is_local_process_zero"}
_NOT_CALLED = (
    "the loop does not call it, so what it does would be left out in silence: use a callback "
    "(on_step_end, on_log, on_evaluate, on_save), or give it another name and call it yourself"
)
# What the plan, the loop and the measurements are made from.
FIXED = {"model", "processing_class", "optimizer", "lr_scheduler", "plan", "train_store"}
FIXED |= {"train_dataset", "eval_dataset", "state", "control", "statement"}
# Arguments of a `Trainer` or `SFTTrainer` that are refused, and why.
REFUSED_GIVEN = {
    "model_init": "the model begins once, and a run that goes on needs the same weights: give the "
    "model itself",
    "quantization_config": "load the model in few bits yourself, userdp.load_model(path, "
    "quantize='4bit', lora=...), and give that",
    "tokenizer": "give it as processing_class",
    **dict.fromkeys(
        ("dataset_text_field", "max_seq_length", "packing", "dataset_kwargs", "num_of_sequences"),
        "it belongs into the arguments: args=SFTConfig(...), where max_seq_length is max_length",
    ),
    "model_init_kwargs": "it belongs into the arguments: args=SFTConfig(...)",
    **dict.fromkeys(
        ("max_length", "sequence_length"),
        "it belongs into the arguments, args=trl.SFTConfig(max_length=...), or set "
        "processing_class.model_max_length",
    ),
}


class NotOfferedError(InputError, AttributeError):
    """A name of a `Trainer` that a private run does not have."""


def refuse_given(given: Mapping[str, Any], known: list[str]) -> None:
    """Refuse arguments that are not in the signature: by name, or as misspelt."""
    for name, value in given.items():
        if name in REFUSED_GIVEN:
            if value is None:
                continue
            raise InputError(f"{name}: {REFUSED_GIVEN[name]}.")
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise TypeError(f"UserDPTrainer has no argument {name!r}.{hint}")


def refuse_overridden(kind: type, base: type) -> None:
    """Refuse a subclass that replaces what the loop here never calls."""
    for name in dict.fromkeys((*REFUSED_NAMES, *dir(transformers.Trainer))):
        is_own = getattr(kind, name, None) is not getattr(base, name, None)
        if is_own and name not in FREE and not name.startswith("__"):
            reason = REFUSED_NAMES.get(name, _NOT_CALLED)
            raise NotOfferedError(f"{kind.__name__}.{name}: {reason}.")


class Surface:
    """The methods of a `Trainer` that neither train nor measure."""

    args: Any
    callback_handler: CallbackHandler
    _loop: Loop
    _measuring: Measuring
    _private: Path

    def __getattr__(self, name: str) -> NoReturn:
        if name in REFUSED_NAMES:
            raise NotOfferedError(f"UserDPTrainer.{name}: {REFUSED_NAMES[name]}.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in REFUSED_NAMES:
            raise NotOfferedError(f"UserDPTrainer.{name}: {REFUSED_NAMES[name]}.")
        if name not in FREE and callable(getattr(type(self), name, None)):
            raise NotOfferedError(f"{type(self).__name__}.{name}: {_NOT_CALLED}.")
        if name in FIXED and (name in vars(self) or hasattr(type(self), name)):
            raise NotOfferedError(
                f"UserDPTrainer.{name} cannot be replaced: the plan, its price and the "
                "measurements are made from it. Make another trainer."
            )
        super().__setattr__(name, value)

    def is_world_process_zero(self) -> bool:
        """Whether this is the first process, which writes and prints."""
        return self._loop.state.is_world_process_zero

    def is_local_process_zero(self) -> bool:
        """The same: every process has its own device, and the first of all writes."""
        return self._loop.state.is_local_process_zero

    def log(self, logs: Metrics, start_time: float | None = None) -> None:
        """Tell callbacks and trackers numbers of your own. Whoever logs them releases them."""
        self._measuring.check_released(logs, "log")
        self._loop.log(dict(logs))

    def save_state(self) -> None:
        """Write the state to `output_dir`; `train` does so, too."""
        self._loop.save_state(Path(self.args.output_dir))

    def log_metrics(self, split: str, metrics: Mapping[str, float | str]) -> None:
        """Print the metrics of a split, one a line; beside the result if not for release."""
        is_secret = self._measuring.has_secrets(metrics)
        note, file = (" (not for release)", sys.stderr) if is_secret else ("", sys.stdout)
        for name, value in sorted(metrics.items()) if self.is_world_process_zero() else ():
            shown = value if isinstance(value, str) else f"{value:.6g}"
            print(f"{split}: {name} = {shown}{note}", file=file)

    def save_metrics(self, split: str, metrics: Metrics, combined: bool = True) -> None:
        """Write the metrics of a split to `output_dir`."""
        self._measuring.check_released(metrics, "save_metrics")
        if not self.is_world_process_zero():
            return
        content = json.dumps(metrics, indent=4, sort_keys=True) + "\n"
        write_file(Path(self.args.output_dir) / f"{split}_results.json", content.encode())

    def add_callback(self, callback: Any) -> None:
        """Add a callback, as in `transformers`."""
        callbacks_of(self.args, [callback])
        if self._measuring.is_private:
            refuse_decisions(self.args, [callback])
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback and return it, as in `transformers`."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, as in `transformers`."""
        self.callback_handler.remove_callback(callback)

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Nothing: the run writes a card of its own, with what may be said about its privacy."""

    def push_to_hub(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: `output_dir` also holds what must not be published."""
        raise InputError(
            f"{self.args.output_dir} also holds the run's secret and the users' records: write "
            f"what may be published with `userdp export {self._private / 'run'} --out DIR`, and "
            "upload that."
        )
