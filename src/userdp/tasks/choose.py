"""From the name of a task to the task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from userdp.data.contents import TextKind
from userdp.errors import InputError
from userdp.names.tasks import TaskName
from userdp.tasks.causal import CausalTask
from userdp.tasks.chat import ChatTask
from userdp.tasks.classification import ClassificationTask
from userdp.tasks.contract import Task
from userdp.tasks.masked import MaskedTask


def usual_task(kind: TextKind) -> TaskName:
    """What is learned if nobody says it: of chats the assistant's turns, else every token.

    What a store holds is public: it follows from the columns that were imported.
    """
    return "chat" if kind in ("chat", "pair") else "causal"


def labels_left_out(name: TaskName | None, kind: TextKind) -> str:
    """What to say where labels were imported and nobody named a task; else empty."""
    if name is not None or kind != "labelled":
        return ""
    return (
        "the records have labels, and without a task their texts alone are learned, token by "
        "token. To learn the labels say task = 'classification'; if the texts are meant, 'causal'."
    )


def task_named(name: TaskName, tokenizer: Any, *, classes: Sequence[str] = ()) -> Task:
    """The task of that name, with the tokenizer's tokens. `classes` are those of the model."""
    pad_token: int = tokenizer.pad_token_id or 0
    match name:
        case "causal":
            return CausalTask(pad_token=pad_token)
        case "chat":
            return ChatTask(pad_token=pad_token)
        case "masked":
            return MaskedTask.of(tokenizer)
        case "classification":
            return ClassificationTask(pad_token=pad_token, classes=tuple(classes))
    raise InputError(
        f"task={name!r} is not known: choose 'causal', 'chat', 'masked' or 'classification'."
    )
