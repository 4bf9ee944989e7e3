"""A task with a loss of the caller's own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from userdp.data.encoding import Encoding
from userdp.data.tokens import TokenRows
from userdp.index import Rows
from userdp.losses import Batch, RecordLoss
from userdp.tasks.contract import Task


@dataclass(frozen=True, kw_only=True)
class OwnLoss:
    """A task with another loss per record. What goes into a batch stays the same.

    `digest` covers the loss's code and what it holds. Under another loss, the same noise
    would show the difference of the two.
    """

    task: Task
    record_loss: RecordLoss
    digest: str = ""

    @property
    def name(self) -> str:
        """The task's name, and the name of the loss."""
        return f"{self.task.name}, loss {self.loss_name} {self.digest}".rstrip()

    @property
    def loss_name(self) -> str:
        """What the loss's code is called. Whoever wrote it may have given it any name."""
        loss: Any = self.record_loss
        return re.sub(r"[^\w.<>]+", "_", getattr(loss, "__qualname__", type(loss).__qualname__))

    @property
    def encoding(self) -> Encoding:
        """The task's own encoding."""
        return self.task.encoding

    def batch(self, rows: TokenRows, group: Rows, rng: np.random.Generator) -> Batch:
        """The task's own batch."""
        return self.task.batch(rows, group, rng)

    def example(self, tokenizer: Any) -> Batch:
        """The task's own example."""
        return self.task.example(tokenizer)

    def predictions(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The task's own predictions."""
        return self.task.predictions(model, batch)
