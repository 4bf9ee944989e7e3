"""What callbacks see of a private run: the same events, and numbers that may be released.

State, control and logs hold the step, the public epoch, the learning rate and measurements on other
people. There is no training loss, no norm and no count of tokens. The weights may be looked at,
because the guarantee covers every step's weights.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers.trainer_callback import CallbackHandler, TrainerCallback

from userdp.errors import InputError
from userdp.files.durable import new_directory, write_file
from userdp.history import ATTRIBUTE, write_history
from userdp.models.load import save_model
from userdp.trainer.measuring import Metrics, metric_name
from userdp.trainer.tracking import Tracking

STATE_FILE = "trainer_state.json"
# Events inside a step, where gradients without noise could be seen.
INSIDE = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")
FOLDER = re.compile(r"checkpoint-(\d+)")


def callbacks_of(args: Any, own: Sequence[Any], *, is_first: bool = True) -> list[Any]:
    """The usual callbacks, the trackers in `report_to`, and the caller's own.

    Trackers are told by the first of several processes.
    """
    for callback in own:
        kind = callback if isinstance(callback, type) else type(callback)
        for event in INSIDE:
            if getattr(kind, event, None) is not getattr(TrainerCallback, event, None):
                raise InputError(
                    f"{kind.__name__} wants {event}, which is inside of a step, where gradients "
                    "have no noise yet: use on_step_end."
                )
        if any(base.__module__.startswith("transformers.integrations") for base in kind.__mro__):
            raise InputError(
                f"{kind.__name__} notes the time of every step, and may send gradients or files "
                "away: name the tracker in report_to instead."
            )
    shown = transformers.PrinterCallback if args.disable_tqdm else transformers.ProgressCallback
    tracking = Tracking(args.report_to if is_first else (), Path(args.output_dir))
    return [transformers.DefaultFlowCallback, tracking, *own, shown]


def begun_state(
    args: Any, steps: int, epochs_a_step: float, *, resume: bool
) -> transformers.TrainerState:
    """The state before the first step, or the state that the run in `output_dir` saved."""
    saved = Path(args.output_dir) / STATE_FILE
    state = transformers.TrainerState()
    if resume and saved.is_file():
        state = transformers.TrainerState.load_from_json(str(saved))
    state.max_steps = steps
    state.num_train_epochs = math.ceil(steps * epochs_a_step)
    state.compute_steps(args, steps)
    return state


class Loop:
    """Tells callbacks what happens, and does what they ask for between two steps."""

    def __init__(
        self,
        args: Any,
        handler: CallbackHandler,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        *,
        card: str,
        epochs_a_step: float,
        evaluate: Callable[[int], Sequence[Metrics]] | None,
    ) -> None:
        self._args = args
        self._handler = handler
        self.state = state
        self.control = control
        # The card beside weights that are saved before the training has ended.
        self._card = card
        self._epochs_a_step = epochs_a_step
        self._evaluate = evaluate
        self._has_begun = False
        # Whether the run's record shall save a checkpoint after this step.
        self._is_save_asked = False

    @property
    def _model(self) -> nn.Module:
        return self._handler.model

    def save_asked(self) -> bool:
        """Whether a checkpoint was asked for since this was last called."""
        asked, self._is_save_asked = self._is_save_asked, False
        return asked

    def stop_asked(self) -> bool:
        """Whether a callback wants the training to end here."""
        return self.control.should_training_stop

    def begin(self) -> None:
        """Before the first step."""
        self._tell("on_train_begin")
        # The weights of a run that goes on are not there yet.
        if self._args.eval_on_start and self._evaluate and self.state.global_step == 0:
            self._measure()
        self._tell("on_epoch_begin")
        self._tell("on_step_begin")

    def on_step(self, steps: int) -> None:
        """After each step: `steps` are done."""
        if not self._has_begun:
            # A run that goes on takes some steps again: what was logged about them comes again.
            history = self.state.log_history
            self.state.log_history = [entry for entry in history if entry["step"] < steps]
            self._has_begun = True
        before = math.floor(round((steps - 1) * self._epochs_a_step, 9))
        self.state.global_step = steps
        self.state.epoch = steps * self._epochs_a_step
        self._tell("on_step_end")
        if self.control.should_epoch_stop:
            raise InputError(
                "a callback set should_epoch_stop, and users who are drawn at random know no epoch "
                "to skip: set should_training_stop to end the training."
            )
        self._do_what_is_asked()
        is_last = steps >= self.state.max_steps or self.stop_asked()
        if is_last or math.floor(round(self.state.epoch, 9)) > before:
            self._tell("on_epoch_end")
            self._do_what_is_asked()
            if not is_last:
                self._tell("on_epoch_begin")
        if not is_last:
            self._tell("on_step_begin")

    def end(self, metrics: Metrics) -> None:
        """After the last step, when everything is written."""
        self.log(metrics)
        self._tell("on_train_end")

    def log(self, numbers: Metrics) -> None:
        """Tell callbacks some numbers, and remember them."""
        if self.state.epoch is not None:
            numbers = {**numbers, "epoch": self.state.epoch}
        self.state.log_history.append({**numbers, "step": self.state.global_step})
        self._tell("on_log", logs=numbers)

    def measured(self, metrics: Metrics) -> None:
        """Log what was measured on other people, and tell callbacks."""
        self.log(metrics)
        self._tell("on_evaluate", metrics=metrics)

    def _tell(self, event: str, **more: Any) -> None:
        tell = getattr(self._handler, event)
        self.control = tell(self._args, self.state, self.control, **more)

    def _do_what_is_asked(self) -> None:
        if self.control.should_log:
            rates = [group["lr"] for group in self._handler.optimizer.param_groups]
            self.log({"learning_rate": float(rates[0])})
        if self.control.should_evaluate:
            self._measure()
        if self.control.should_save:
            self._save()

    def _measure(self) -> None:
        if self._evaluate is None:
            raise InputError(
                "a callback asks to evaluate: give an eval_dataset, of other people. With ema the "
                "average is measured at the end alone."
            )
        # Callbacks are not told of numbers that are not for release, so none of them would reset
        # the wish.
        self.control.should_evaluate = False
        metrics: Metrics = {}
        for found in self._evaluate(self.state.global_step):
            self.measured(found)
            metrics |= found
        name = self._args.metric_for_best_model
        value = metrics.get(metric_name(name)) if name else None
        if value is not None:
            best, greater = self.state.best_metric, bool(self._args.greater_is_better)
            if best is None or (value > best if greater else value < best):
                self.state.best_metric = value
                self.state.best_global_step = self.state.global_step

    def _save(self) -> None:
        """Write the weights of this step where scripts look for them; the record saves itself."""
        self._is_save_asked = True
        if self.state.is_world_process_zero:
            self._write()
        self._tell("on_save")

    def _write(self) -> None:
        out = Path(self._args.output_dir)
        with new_directory(out / f"checkpoint-{self.state.global_step}") as folder:
            save_model(self._model, self._handler.processing_class, folder, card=self._card)
            write_history(folder, vars(self._model)[ATTRIBUTE])
            self.save_state(folder)
        self.save_state(out)
        if self._args.save_total_limit:
            found = {
                int(name[1]): path
                for path in out.iterdir()
                if (name := FOLDER.fullmatch(path.name)) is not None
            }
            for old in sorted(found)[: -self._args.save_total_limit]:
                shutil.rmtree(found[old])

    def save_state(self, folder: Path) -> None:
        """Write the state, as `transformers` does: by the first process."""
        if not self.state.is_world_process_zero:
            return
        content = json.dumps(dataclasses.asdict(self.state), indent=2, sort_keys=True) + "\n"
        write_file(folder / STATE_FILE, content.encode())
