"""Optimizers and schedules of the learning rate, by name. They see noised gradients only.

Whatever is done with a noised gradient is post-processing, so every choice here is free of charge.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from userdp import defaults
from userdp.config.sections import TrainingSettings
from userdp.errors import InputError
from userdp.models.checks import trainable_parameters
from userdp.names.optimizers import (
    LIKE_ADAMW,
    MOST_RATE,
    OPTIMIZERS,
    SCHEDULE_NAME,
    usable,
)
from userdp.optimizers.muon import MuonAndAdamW, is_hidden_matrix
from userdp.optimizers.scaled_momentum import ScaledMomentum
from userdp.optimizers.schedules import share_of_rate

# Settings that have a key of their own, or that change how torch computes and not what.
NOT_OPTIONS = {"self", "params", "lr", "weight_decay", "foreach", "fused"}
NOT_OPTIONS |= {"maximize", "capturable", "differentiable"}


def optimizer_of(model: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """The optimizer that a configuration names."""
    return make_optimizer(
        model,
        settings.optimizer,
        settings.learning_rate,
        weight_decay=settings.weight_decay,
        options=settings.optimizer_options,
    )


def check_options(settings: TrainingSettings) -> None:
    """Refuse options that the optimizer does not have. Needs no model."""
    kind = _kind(settings.optimizer)
    _checked_options(settings.optimizer, kind, settings.weight_decay, settings.optimizer_options)


def schedule_of(
    optimizer: torch.optim.Optimizer, settings: TrainingSettings
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """The schedule that a configuration names."""
    return make_schedule(
        optimizer,
        settings.schedule,
        settings.steps,
        warmup_steps=settings.warmup_steps,
        hold=settings.schedule_hold,
    )


def make_optimizer(
    model: nn.Module,
    name: str,
    learning_rate: float | None = None,
    *,
    weight_decay: float | None = None,
    options: Mapping[str, Any] | None = None,
) -> torch.optim.Optimizer:
    """The named torch optimizer over the trainable parameters. On CUDA it is fused if it can be.

    The learning rate is by default that of `defaults.learning_rate`, for AdamW and its kin.
    `weight_decay` is by default the optimizer's own. `options` are further arguments of the
    optimizer, such as `betas` or `momentum`. `muon` is Muon for the matrices of hidden layers and
    AdamW for all other parameters; its options are those of Muon. `scaled` is `ScaledMomentum`.
    """
    name = usable(name)
    kind = _kind(name)
    arguments = _checked_options(name, kind, weight_decay, options or {})
    parameters = trainable_parameters(model)
    if learning_rate is None:
        learning_rate = default_rate(model, name)
    if not 0 <= learning_rate < MOST_RATE:
        raise InputError(f"learning_rate={learning_rate:g}: give a number below {MOST_RATE:g}.")
    try:
        if kind is torch.optim.Muon:
            return MuonAndAdamW(
                [p for key, p in parameters.items() if is_hidden_matrix(model, key, p)],
                [p for key, p in parameters.items() if not is_hidden_matrix(model, key, p)],
                lr=learning_rate,
                **arguments,
            )
        if "fused" in _accepted(kind):
            arguments["fused"] = all(parameter.is_cuda for parameter in parameters.values())
        return kind(list(parameters.values()), lr=learning_rate, **arguments)  # pyright: ignore
    except (TypeError, ValueError) as error:
        raise InputError(f"optimizer = {name!r} refuses its settings: {error}.") from None


def default_rate(model: nn.Module, name: str) -> float:
    """The learning rate for whoever gives none. It follows from the model's shape alone."""
    width = getattr(getattr(model, "config", None), "hidden_size", None)
    if name not in LIKE_ADAMW or not isinstance(width, int):
        known = ", ".join(LIKE_ADAMW)
        raise InputError(
            f"learning_rate is missing: there is a default for {known} and a model whose "
            f"configuration has a hidden_size, not for {type(model).__name__} with {name!r}. Give "
            "one."
        )
    has_adapters = any("lora_" in key for key in trainable_parameters(model))
    return defaults.learning_rate(adapters=has_adapters, width=width)


def check_schedule(scheduler: Any, optimizer: Any = None) -> None:
    """Refuse a schedule of another optimizer, or one that wants a metric after each step."""
    if scheduler is None:
        return
    if "metrics" in inspect.signature(scheduler.step).parameters:
        raise InputError(
            f"{type(scheduler).__name__} wants a metric after every step, and a private run has "
            "none to give: take a schedule that follows from the number of the step."
        )
    if optimizer is not None and getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise InputError(
            f"the {type(scheduler).__name__} is the schedule of another optimizer, whose rate it "
            "changes: make it with the optimizer that is given."
        )


def check_optimizer(optimizer: Any) -> None:
    """Refuse what is no optimizer, and one that computes losses again in a step, as LBFGS does."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"optimizer={optimizer!r} is no optimizer: give an object, such as "
            "torch.optim.AdamW(model.parameters()), or a name."
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InputError(
            f"{type(optimizer).__name__} computes the loss again within a step, and a step has one "
            "noised gradient: use another, such as 'adamw'."
        )


def _kind(name: str) -> type[torch.optim.Optimizer]:
    return getattr(torch.optim, OPTIMIZERS[name]) if name in OPTIMIZERS else ScaledMomentum


def _accepted(kind: type) -> set[str]:
    return set(inspect.signature(kind).parameters)


def _checked_options(
    name: str, kind: type, weight_decay: float | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of the optimizer, if it knows them all."""
    known = sorted(_accepted(kind) - NOT_OPTIONS)
    for option in options:
        if option not in known:
            close = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}."
            raise InputError(f"optimizer = {name!r} has no option {option!r}; {hint}")
    # Pairs are lists in TOML, and tuples in torch.
    found = {o: tuple(v) if isinstance(v, list) else v for o, v in options.items()}
    if weight_decay is not None:
        if "weight_decay" not in _accepted(kind):
            raise InputError(f"optimizer = {name!r} has no weight_decay: leave it out.")
        found["weight_decay"] = weight_decay
    return found


def make_schedule(
    optimizer: torch.optim.Optimizer,
    name: str,
    steps: int,
    *,
    warmup_steps: int = 0,
    hold: float = 0.0,
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """The rate of every step (`schedules`); None if it is always the full rate."""
    share = share_of_rate(name, steps, warmup_steps=warmup_steps, hold=hold)
    if name == "constant" and not warmup_steps:
        return None
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    # For the run's own description.
    setattr(schedule, SCHEDULE_NAME, name)
    return schedule
