"""The model, the tokenizer and the task that a configuration names."""

from __future__ import annotations

import logging
import pkgutil
from typing import Any, cast

import torch
from torch import nn

from userdp.config.file import Config
from userdp.data.store import UserStore
from userdp.errors import InputError
from userdp.losses import RecordLoss
from userdp.models.adapters import Lora
from userdp.models.heads import classes_at, refuse_other_head
from userdp.models.load import classes_of, load_model, load_tokenizer
from userdp.tasks import Task, TaskName, labels_left_out, task_named, usual_task

_LOG = logging.getLogger(__name__)


def load_configured_model(config: Config) -> tuple[nn.Module, Any]:
    """The model to train, with adapters if the configuration asks for them, and its tokenizer."""
    model, _ = load_model(
        config.model.path,
        task=config.data.task or "causal",
        classes=config.data.classes,
        lora=Lora(**config.model.lora.model_dump()) if config.model.lora else None,
        gguf_file=config.model.gguf_file,
        dtype=getattr(torch, config.model.dtype),
        quantize=config.model.quantize,
        # Each rank's rows move to its device when the model is divided.
        device="cpu" if config.training.shard else config.training.device,
    )
    return model, load_configured_tokenizer(config)


def load_configured_tokenizer(config: Config) -> Any:
    """The tokenizer of the model to train, with the configured chat template."""
    tokenizer = load_tokenizer(config.model.path, gguf_file=config.model.gguf_file)
    if config.data.chat_template is not None:
        tokenizer.chat_template = config.data.read_chat_template()
    return tokenizer


def configured_task(config: Config, tokenizer: Any, store: UserStore) -> Task:
    """The task of a configuration; without a name, the usual one for such a store."""
    name = config.data.task or usual_task(store.text_kind)
    classes = config.data.classes or ()
    if name == "classification" and not classes:
        classes = classes_at(config.model.path)
    return task_named(name, tokenizer, classes=classes)


def configured_loss(config: Config) -> RecordLoss | None:
    """The user's own loss that a configuration names, imported from this environment."""
    name = config.data.record_loss
    if name is None:
        return None
    try:
        found = pkgutil.resolve_name(name)
    except Exception as error:
        # Importing runs the module's code, so anything can go wrong in it.
        said = str(error).strip().partition("\n")[0]
        raise InputError(
            f"[data] record_loss = {name!r} cannot be imported ({type(error).__name__}: {said}). "
            "Install its package, or name its folder in PYTHONPATH."
        ) from error
    if not callable(found):
        raise InputError(
            f"[data] record_loss = {name!r} is a {type(found).__name__}: name a function of the "
            "model and a batch that gives one loss per record."
        )
    return cast(RecordLoss, found)


def named_task(
    name: TaskName | None,
    model: nn.Module,
    tokenizer: Any,
    store: UserStore,
    *,
    record_loss: RecordLoss | None = None,
) -> Task:
    """The task of that name for this model; without a name, the usual one for such a store.

    A model of `transformers` with a head for another task is refused. With a `record_loss` of one's
    own it is not: that loss may read the model as it likes.
    """
    left_out = labels_left_out(name, store.text_kind)
    name = name or usual_task(store.text_kind)
    if record_loss is None:
        if left_out:
            _LOG.warning("%s", left_out)
        refuse_other_head(model, name)
    return task_named(name, tokenizer, classes=classes_of(model))
