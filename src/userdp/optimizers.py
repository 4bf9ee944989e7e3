"""Optimizers and schedules of the learning rate. They see noised gradients only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from userdp.models.checks import trainable_parameters


def make_optimizer(model: nn.Module, name: str, learning_rate: float) -> torch.optim.Optimizer:
    """The named torch optimizer over the trainable parameters. On CUDA it is fused."""
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    parameters = list(trainable_parameters(model).values())
    fused = all(parameter.is_cuda for parameter in parameters)
    return kinds[name](parameters, lr=learning_rate, fused=fused)


def make_schedule(optimizer: torch.optim.Optimizer, name: str, steps: int) -> Any:
    """None for a constant rate; else constant for half of the run, then linear to zero."""
    if name == "constant":
        return None
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, 2 * max(0, steps - step) / steps)
    )
