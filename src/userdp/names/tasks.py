"""The names of the tasks (`tasks`), and the words in which what they predict is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TaskName = Literal["causal", "chat", "masked", "classification"]


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What a task predicts: losses are means over a `unit`; `right` is what accuracy is called."""

    unit: str = "token"
    right: str = "next token right"
    # The exponential of the loss says something of tokens only.
    has_perplexity: bool = True


_PREDICTED = {
    "masked": Predicted(unit="masked token", right="masked token right"),
    "classification": Predicted(unit="record", right="class right", has_perplexity=False),
}


def predicted(task: str) -> Predicted:
    """What a task of this name predicts. A name may go on with settings of the task."""
    first = task.replace(",", " ").split()[:1]
    return _PREDICTED.get("".join(first), Predicted())
