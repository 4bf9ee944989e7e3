"""What a checkpoint holds of a run: how it is gathered, and how it is put back."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from userdp.errors import RESUME, InputError
from userdp.files.interrupts import InterruptedRunError
from userdp.history import History, carry, history_of, merged
from userdp.ledger.book import Ledger
from userdp.losses import Batch
from userdp.models.checks import trainable_parameters
from userdp.optimizers.averaging import WeightAverage, restore_average
from userdp.report.closing import write_words
from userdp.runs.checkpoints import Moment, check_saveable, checkpoints_of
from userdp.runs.continuing import Beginning
from userdp.runs.files import checked_run
from userdp.runs.record import RunRecord
from userdp.sharded_tensors import is_shard, put_whole
from userdp.sharding.dividing import divided_optimizer
from userdp.sharding.saved import save_shards
from userdp.step import PrivateStep


def restore_beginning(
    beginning: Beginning,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    average: WeightAverage | None = None,
) -> None:
    """Put the model, the optimizer, the schedule and the average where the run begins.

    The optimizer keeps its new settings, such as the learning rate. What it has gathered comes from
    the checkpoint, if that was saved by an optimizer of the same kind.
    """
    moment = beginning.moment
    if moment is None:
        return
    restore_weights(model, moment)
    restore_average(average, moment.state.get("average"))
    saved = moment.state.get("optimizer")
    if saved is not None and saved["kind"] == type(optimizer).__name__:
        settings = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": saved["values"]["state"], "param_groups": settings})
    if scheduler is not None:
        with warnings.catch_warnings():
            # torch expects a step of the optimizer in between; these were taken by other runs.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            for _ in range(beginning.before):
                scheduler.step()


def restore(
    moment: Moment,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    step: PrivateStep,
    example: Batch,
    average: WeightAverage | None = None,
) -> None:
    """Put everything where it was when the checkpoint was saved."""
    restore_weights(model, moment)
    restore_average(average, moment.state.get("average"))
    values = moment.state["optimizer"]["values"]
    optimizer.load_state_dict(divided_optimizer(values, optimizer))
    if scheduler is not None:
        scheduler.load_state_dict(moment.state["schedule"])
    step.load_state_dict(moment.state["step"], example)


class Checkpoint:
    """Saves a run between two steps: everything that its next step needs."""

    def __init__(
        self,
        record: RunRecord,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        step: PrivateStep,
        before: int,
        average: WeightAverage | None = None,
    ) -> None:
        self._record = record
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._step = step
        self._before = before
        self._average = average
        # Every rank's part of the state is gathered, so all of them ask for it.
        state = self._state() if record.path is not None or record.ranks.count > 1 else {}
        record.ranks.on_first(lambda: check_saveable(state))

    def _state(self) -> dict[str, Any]:
        return {
            "before": self._before,
            "optimizer": optimizer_state(self._optimizer),
            "schedule": None if self._scheduler is None else _plain_state(self._scheduler),
            "step": self._step.state_dict(),
            "average": None if self._average is None else self._average.state_dict(),
        }

    @property
    def is_due(self) -> bool:
        """Whether it is time to save. While charged steps are repeated there is nothing new."""
        record = self._record
        if record.checkpoints is None or record.is_repeating:
            return False
        return record.checkpoints.is_due(record.steps)

    def begin_saving(self) -> None:
        """Save what all ranks have now; the first writes it while the run goes on."""
        # Other weights on another rank would be found too late otherwise.
        self._step.check_ranks()
        state, weights = self._state(), trainable_parameters(self._model)
        moment = self._record.moment(weights, state)
        if any(is_shard(weight) for weight in weights.values()):
            save_shards(self._record.checkpoints, self._record.ranks, moment)
        elif self._record.checkpoints is not None:
            self._record.checkpoints.save(moment)

    def save(self) -> None:
        """Save now, unless that has been done; return when it is on disk."""
        if self._record.ranks.by_first(self._is_unsaved):
            self.begin_saving()
            self._record.ranks.on_first(self._wait)

    def _is_unsaved(self) -> bool:
        checkpoints = self._record.checkpoints
        if checkpoints is None or self._record.is_repeating:
            return False
        checkpoints.wait()
        return checkpoints.last_step != self._record.steps

    def _wait(self) -> None:
        assert self._record.checkpoints is not None
        self._record.checkpoints.wait()

    def save_and_stop(self, signal: int) -> NoReturn:
        """Save, and end the run because a signal asked for it."""
        self.save()
        steps, path = self._record.steps, self._record.path
        where = "" if path is None else f" It is saved: go on with the same command and {RESUME}."
        raise InterruptedRunError(f"stopped after step {steps:,}.{where}", signal)


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's values, and what kind it is."""
    return {"kind": type(optimizer).__name__, "values": optimizer.state_dict()}


def _plain_state(scheduler: Any) -> dict[str, Any]:
    """The schedule's state without what torch keeps there for itself."""
    return {
        name: value for name, value in scheduler.state_dict().items() if name != "_get_lr_called"
    }


def restore_weights(model: nn.Module, moment: Moment) -> None:
    """Put the trained weights of a checkpoint into the model."""
    own = trainable_parameters(model)
    same = own.keys() == moment.weights.keys() and all(
        (p.shape, p.dtype) == (moment.weights[name].shape, moment.weights[name].dtype)
        for name, p in own.items()
    )
    if not same:
        raise InputError(
            "the checkpoint holds other weights than the model trains: another model, or another "
            "choice of what is trained. Put that back."
        )
    for name, parameter in own.items():
        put_whole(parameter, moment.weights[name])


def restore_finished(run: Path, ledger: Ledger, model: nn.Module) -> None:
    """Put the weights of a finished run into the model.

    If the run was stopped at its very end, it gets the card and the statement that it lacks. Other
    files than those that the ledger names are refused: nothing is promised of them.
    """
    if "final_weights" not in (ledger.end or {}).get("digests", {}):
        raise InputError(f"{run} is a dry run: nothing was trained. Choose another directory.")
    record = checked_run(run, ledger)
    moment = checkpoints_of(run).newest()
    if moment is None or moment.step != ledger.steps:
        raise InputError(
            f"{run} is finished, and its last checkpoint is gone: load its weights from "
            f"{run / 'model'}."
        )
    restore_weights(model, moment)
    if (saved := moment.state.get("average")) is not None:
        # The checkpoint holds the weights that a longer run goes on from. Released is the average.
        average = WeightAverage(model, decay=saved["decay"])
        average.load_state_dict(saved)
        average.put_into_model()
    carry_finished(model, ledger, (run.resolve(),))
    if not (run / "statement.json").is_file():
        write_words(record)


def carry_finished(model: nn.Module, ledger: Ledger, homes: tuple[Path, ...]) -> None:
    """Whoever trains on with this model pays for what was spent on it."""
    entries = tuple(item.to_json() for item in ledger.earlier)
    entry = ledger.as_entry()
    own = History(entries=(*entries, *([] if entry is None else [entry])), homes=homes)
    carry(model, merged(history_of(model), own))
