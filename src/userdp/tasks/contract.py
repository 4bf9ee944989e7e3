"""What every task must do: turn a group of rows into a batch, and say what its loss is."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from userdp.data.encoding import Encoding
from userdp.data.tokens import TokenRows
from userdp.index import Rows
from userdp.losses import Batch, RecordLoss


class Task(Protocol):
    """How the rows of a group are read.

    `name` is written into the ledger. A batch depends on the rows of its group and on `rng` alone,
    and `rng` belongs to this group and this step.
    """

    @property
    def name(self) -> str:
        """What distinguishes this task from every other, its settings included."""
        ...

    @property
    def encoding(self) -> Encoding:
        """How records become rows."""
        ...

    @property
    def record_loss(self) -> RecordLoss:
        """The loss of each record of a batch."""
        ...

    def batch(self, rows: TokenRows, group: Rows, rng: np.random.Generator) -> Batch:
        """The tensors of one group, one record per line."""
        ...

    def example(self, tokenizer: Any) -> Batch:
        """A made-up batch for the probe, with every token that the tokenizer knows."""
        ...

    def predictions(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits of shape (rows, places, choices), and the right choices of shape (rows, places).

        A place without a right choice has the label -100.
        """
        ...
