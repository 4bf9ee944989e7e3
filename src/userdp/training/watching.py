"""What is told about a run while it runs: its validation curve, and numbers for trackers.

All of it is public or about other people (`validation_curve`, `trackers`). Epsilon is that of the
ledger's plan after the steps taken so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import nn

from userdp.ledger.book import Ledger
from userdp.optimizers.averaging import WeightAverage
from userdp.runs.record import RunRecord
from userdp.step import PrivateStep
from userdp.training.progress import NoProgress, TrainingProgress
from userdp.training.trackers import Tracker
from userdp.training.validation import Validator

# Epsilon takes a moment to evaluate, so trackers get it this often in a run, and with each point.
EPSILON_POINTS = 20


class Watch:
    """Is called before the first step and after each one."""

    def __init__(
        self,
        record: RunRecord,
        step: PrivateStep,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        validator: Validator,
        trackers: Sequence[Tracker],
        progress: TrainingProgress | NoProgress,
        average: WeightAverage | None = None,
    ) -> None:
        self._record = record
        self._step = step
        self._model = model
        self._optimizer = optimizer
        self._validator = validator
        self._trackers = trackers
        self._progress = progress
        self._average = average
        self._steps = record.ledger.plan.steps
        self._used = self._settings()

    def begin(self) -> None:
        """Measure the model as it is before the first step."""
        if self._record.steps == 0:
            self._tell(0, {})

    def after_step(self) -> None:
        """Measure the model if it is time to, and tell trackers how the step was taken."""
        used, self._used = self._used, self._settings()
        self._tell(self._record.steps, used)

    def _tell(self, step: int, numbers: dict[str, float]) -> None:
        told = dict(numbers)
        is_due = step == self._steps or step % math.ceil(self._steps / EPSILON_POINTS) == 0
        # What is measured is what would be released now.
        last = step if self._record.is_halted else self._steps
        with nullcontext() if self._average is None else self._average.in_model():
            point = self._validator.measure_if_due(self._model, step, last)
        if point is not None:
            # Numbers that are not for release may be seen by the owner, who runs this.
            self._progress.note(step, point.in_words)
        if point is not None and self._validator.is_released:
            told |= point.numbers()
            is_due = True
        if not self._trackers:
            return
        if is_due:
            told |= epsilon_spent(self._record.ledger, step)
        for tracker in self._trackers:
            if told:
                tracker.log(told, step)

    def _settings(self) -> dict[str, float]:
        """How the next step will be taken. The clip norm is public, or follows a noised count."""
        found = {"learning_rate": float(self._optimizer.param_groups[0]["lr"])}
        clip_norm = self._step.clip_norm
        return found | ({"clip_norm": clip_norm} if math.isfinite(clip_norm) else {})


def epsilon_spent(ledger: Ledger, steps: int) -> dict[str, float]:
    """Epsilon after so many steps, with all that is composed; nothing if none is promised."""
    if ledger.plan.non_private or ledger.plan.mark is not None:
        return {}
    found = ledger.plan.epsilon(steps, paid=ledger.paid, earlier=ledger.earlier)
    return {"epsilon": found} if math.isfinite(found) else {}
