"""Where a run goes on from: its own checkpoint, or as a fork from the checkpoint of another run.

Resuming takes the steps that are left, with the noise that the run began with. A fork is a new run
with new noise. It begins with the weights of a checkpoint, and everything that its parent was
charged for is composed with it. The parent's files move to `RUN/earlier/001/`, and it cannot go on.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from userdp.chain import without_torn_row
from userdp.checkpoints import Moment, check_saveable
from userdp.errors import InputError
from userdp.history import History, carry, history_of, merged
from userdp.interrupts import InterruptedRunError
from userdp.ledger import Ledger
from userdp.losses import Batch
from userdp.models.checks import trainable_parameters
from userdp.rows_file import RowsFile
from userdp.run_record import RunRecord, checkpoints_of, discard
from userdp.step import PrivateStep

EARLIER = "earlier"
# The ledger moves last: as long as it is there, the files are not all moved.
MOVED = (
    "statement.json",
    "report.html",
    "MODEL_CARD.md",
    "model",
    "config.toml",
    "checkpoints",
    "secret",
    "ledger.jsonl",
)


def charged_ledger(run: Path) -> Ledger | None:
    """The ledger in `run`, to look at; None if it was charged for no step.

    A last row that was cut short by a kill is cut off.
    """
    path = run / "ledger.jsonl"
    if not path.is_file():
        return None
    content = path.read_bytes()
    whole = without_torn_row(content)
    if not whole:
        return None
    if whole != content:
        Ledger.open(path).close()
    found = Ledger.read(path)
    return found if found.steps else None


def clear_unbegun(run: Path) -> None:
    """Delete what a run left that was stopped before its first step: it has released nothing."""
    path = run / "ledger.jsonl"
    if path.is_file():
        # Under the lock, so that a run which is just beginning elsewhere is not deleted.
        held = RowsFile.open(path)
        try:
            discard(run)
        finally:
            held.close()
    elif run.is_dir():
        discard(run)


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What a run begins with, if not with the model as it was loaded.

    `before` is the number of steps that the runs before it took on the way to these weights.
    `parent` is the directory of the run that a fork comes from.
    """

    before: int = 0
    moment: Moment | None = None
    parent: Path | None = None


def beginning_of(run: Path) -> Beginning:
    """What the run in `run` began with."""
    moment = checkpoints_of(run).initial()
    return Beginning(before=0 if moment is None else moment.state["before"], moment=moment)


def fork(run: Path, model: nn.Module, *, step: int | None = None) -> Beginning:
    """Begin a new run with the last checkpoint in `run`, or with the one after `step` steps.

    From here on the model carries what the parent was charged for.
    """
    _finish_moving(run)
    parent = run
    ledger = charged_ledger(run)
    if ledger is None:
        parent = _last_moved(run)
        ledger = None if parent is None else charged_ledger(parent)
    if parent is None or ledger is None:
        raise InputError(f"{run} holds no run that was charged: there is nothing to fork.")
    checkpoints = checkpoints_of(parent)
    began = checkpoints.initial()
    moment = checkpoints.newest(step) or (began if step in (None, 0) else None)
    if step is not None and (moment is None or moment.step != step):
        raise InputError(f"{parent / 'checkpoints'} has no checkpoint after {step} steps.")
    entry = ledger.as_entry()
    assert entry is not None
    entries = (*(item.to_json() for item in ledger.earlier), entry)
    carry(model, merged(history_of(model), History(entries=entries)))
    before = 0 if began is None else began.state["before"]
    return Beginning(
        before=before + (0 if moment is None else moment.step), moment=moment, parent=parent
    )


def move_parent(run: Path, parent: Path) -> Path:
    """Move the parent's files out of the way of the fork; returns where they are now."""
    if parent == run:
        _move(run, _next_place(run))
    found = _last_moved(run)
    assert found is not None
    return found


def _places(run: Path) -> list[Path]:
    return sorted((run / EARLIER).glob("[0-9][0-9][0-9]"))


def _last_moved(run: Path) -> Path | None:
    whole = [place for place in _places(run) if (place / "ledger.jsonl").is_file()]
    return whole[-1] if whole else None


def _next_place(run: Path) -> Path:
    return run / EARLIER / f"{len(_places(run)) + 1:03d}"


def _finish_moving(run: Path) -> None:
    """Move what is left, if the program was stopped while it moved a parent's files."""
    for place in _places(run):
        if not (place / "ledger.jsonl").is_file():
            _move(run, place)


def _move(run: Path, place: Path) -> None:
    # Under the lock: a run that goes on in another process is not moved away.
    held = RowsFile.open(run / "ledger.jsonl")
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in MOVED:
            if (run / name).exists():
                os.replace(run / name, place / name)
    finally:
        held.close()


def restore_beginning(
    beginning: Beginning, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any
) -> None:
    """Put the model, the optimizer and the schedule where the run begins.

    The optimizer keeps its new settings, such as the learning rate. What it has gathered comes from
    the checkpoint, if that was saved by an optimizer of the same kind.
    """
    moment = beginning.moment
    if moment is None:
        return
    restore_weights(model, moment)
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
) -> None:
    """Put everything where it was when the checkpoint was saved."""
    restore_weights(model, moment)
    optimizer.load_state_dict(moment.state["optimizer"]["values"])
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
    ) -> None:
        self._record = record
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._step = step
        self._before = before
        if record.path is not None:
            check_saveable(self._state())

    def _state(self) -> dict[str, Any]:
        return {
            "before": self._before,
            "optimizer": optimizer_state(self._optimizer),
            "schedule": None if self._scheduler is None else _plain_state(self._scheduler),
            "step": self._step.state_dict(),
        }

    def save_if_due(self) -> None:
        """Save if it is time to. While charged steps are repeated there is nothing new to save."""
        record = self._record
        if record.checkpoints is None or record.is_repeating:
            return
        if record.checkpoints.is_due(record.steps):
            self._begin_saving()

    def _begin_saving(self) -> None:
        assert self._record.checkpoints is not None
        weights = trainable_parameters(self._model)
        self._record.checkpoints.save(self._record.moment(weights, self._state()))

    def save(self) -> None:
        """Save now, unless that has been done; return when it is on disk."""
        checkpoints = self._record.checkpoints
        if checkpoints is None or self._record.is_repeating:
            return
        checkpoints.wait()
        if checkpoints.last_step != self._record.steps:
            self._begin_saving()
            checkpoints.wait()

    def save_and_stop(self, signal: int) -> NoReturn:
        """Save, and end the run because a signal asked for it."""
        self.save()
        steps, path = self._record.steps, self._record.path
        where = "" if path is None else " It is saved: go on with the same command and --resume."
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
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(moment.weights[name])
