"""Divides what belongs to a model along with it: its optimizer, its average, a saved state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from userdp.errors import InputError
from userdp.optimizers.averaging import WeightAverage
from userdp.plan import Plan
from userdp.ranks import Ranks
from userdp.sharded_tensors import is_shard, own_rows
from userdp.sharding.shard import divides_trained, shard


def refuse_with_shards(*, public: bool, average: bool) -> None:
    """Refuse what runs the model, or changes it, on one rank alone."""
    if public or average:
        what = "public data" if public else "ema with validation"
        raise InputError(
            f"shard = true with {what}: it needs the whole model on one rank. Leave out one of "
            "the two."
        )


def divide(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: WeightAverage | None,
    ranks: Ranks,
    plan: Plan,
) -> None:
    """Divide the model over the ranks. The optimizer and the average go on with its rows."""
    if ranks.count == 1:
        return
    if any(is_shard(parameter) for parameter in model.parameters()):
        raise InputError(
            "the model is sharded already: give train() the whole model with StepSettings("
            "shard=True), or use PrivateStep, which takes a sharded one."
        )
    before = dict(model.named_parameters())
    shard(model, ranks=ranks, trained=divides_trained(model, plan))
    rows = {id(before[name]): parameter for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        # In place: other optimizers may share the list.
        group["params"][:] = [rows.get(id(p), p) for p in group["params"]]
    for parameter in list(optimizer.state):
        state: dict[str, Any] = optimizer.state.pop(parameter)
        own = rows.get(id(parameter), parameter)
        optimizer.state[own] = divided_like(state, own)
    if average is not None:
        average.follow(model, divided_like)


def divided_like(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """The tensors of one parameter's state: rows like the parameter's, others whole on all ranks.

    Single numbers stay as they are.
    """
    if not is_shard(parameter):
        return {name: _beside(value, parameter) for name, value in state.items()}
    return {name: _divided(value, parameter) for name, value in state.items()}


def _beside(value: Any, parameter: Tensor) -> Any:
    """A tensor of the parameter's shape where the parameter is; it may have moved to a GPU."""
    is_like = isinstance(value, Tensor) and value.shape == parameter.shape
    return value.to(parameter.device) if is_like else value


def _divided(value: Any, parameter: Any) -> Any:
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(value, Tensor) or not value.dim() or is_shard(value):
        return value
    mesh = parameter.device_mesh
    if value.shape != parameter.shape:
        whole = value.to(parameter.device)
        return DTensor.from_local(whole, mesh, (Replicate(),), run_check=False)
    rows = own_rows(value, parameter).to(parameter.device)
    return DTensor.from_local(
        rows,
        mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def divided_optimizer(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's saved values with the rows of this rank, to be loaded."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        number: divided_like(values, parameters[number])
        for number, values in saved["state"].items()
    }
    return {**saved, "state": state}
