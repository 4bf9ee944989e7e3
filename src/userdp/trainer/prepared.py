"""The model that a trainer was given, with its adapters and its tokenizer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn

from userdp.errors import InputError
from userdp.history import history_of
from userdp.models.load import load_model, load_tokenizer, remember
from userdp.names.tasks import TaskName


def refuse(name: str, value: Any, reason: str) -> None:
    """Refuse an argument that is given, and say why."""
    if value is not None:
        raise InputError(f"{name}: {reason}.")


def prepared(
    model: str | nn.Module,
    tokenizer: Any,
    peft_config: Any,
    args: Any,
    task: TaskName = "causal",
) -> tuple[nn.Module, Any]:
    """The model with its adapters, and its tokenizer."""
    options = dict(getattr(args, "model_init_kwargs", None) or {})
    if isinstance(model, str):
        dtype = options.pop("dtype", options.pop("torch_dtype", None)) or torch.float32
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        refuse("model_init_kwargs", options or None, "load the model yourself, and give that")
        loaded, own = load_model(model, task=task, dtype=dtype)
    else:
        refuse("model_init_kwargs", options or None, "the model is loaded already; leave it out")
        loaded, own = model, None
        source = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
        if Path(source).is_dir() and not history_of(model).all_entries():
            remember(model, Path(source))
        _refuse_unknown_adapter(model)
        if tokenizer is None:
            if not source:
                raise InputError("processing_class is missing: give the model's tokenizer.")
            own = load_tokenizer(source)
    tokenizer = tokenizer or own
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if peft_config is not None:
        if isinstance(loaded, peft.PeftModel):
            raise InputError(
                "peft_config: the model has adapters already, and adapters on adapters cannot be "
                "loaded again: leave it out to train those on, or give a model without adapters."
            )
        if getattr(peft_config, "lora_dropout", 0):
            warnings.warn(
                f"lora_dropout={peft_config.lora_dropout} has no effect: dropout is off in private "
                "training, because the noise regularises enough.",
                stacklevel=3,
            )
        loaded = peft.get_peft_model(loaded, peft_config)  # pyright: ignore[reportArgumentType]
    return loaded, tokenizer


def _refuse_unknown_adapter(model: nn.Module) -> None:
    """Refuse trained adapters if nobody knows what was spent on them.

    An adapter that another library loaded does not say where it came from. A new one has B = 0.
    """
    if history_of(model).all_entries():
        return
    for name, weight in model.named_parameters():
        if "lora_B" in name and bool(weight.detach().count_nonzero()):
            raise InputError(
                "the model has a trained adapter, and what was spent on it is not known: give the "
                "adapter's directory as model=, so that its record is read."
            )
