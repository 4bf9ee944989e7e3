"""Tensors of a sharded model, seen from code that knows of one process only.

A model that `torch.distributed.fsdp.fully_shard` divided holds of each weight the rows of its own
rank, as a `DTensor` of the whole shape. While a layer runs, the whole weight stands in its place:
another tensor, to which gradients flow. Code that asks for gradients asks for those of `leaf_of`;
code that looks at values looks at `local_of`, or at `whole_of` where every rank asks at once.
Without shards each of them is the tensor itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# Set on a sharded parameter when the model is divided (`sharding.passes`).
_LEAF = "userdp_leaf"
# Set on a whole weight that stands in for a shard while users train (`sharding.copies`).
_COPY = "userdp_copy"
_REST = "_userdp_rest"


def is_shard(tensor: Tensor) -> bool:
    """Whether the tensor is divided over the ranks."""
    return hasattr(tensor, "to_local")


def note_copy(whole: Tensor) -> None:
    """Note that a whole weight stands in for a shard: its values come and go."""
    setattr(whole, _COPY, True)


def is_divided(model: nn.Module) -> bool:
    """Whether any weight of the model is a shard, or stands in for one."""
    return any(is_shard(p) or hasattr(p, _COPY) for p in model.parameters())


def device_of(model: nn.Module, *, sharded: bool = False) -> torch.device:
    """Where the model computes, or will once it is `sharded`: until then it may be on the CPU."""
    if sharded and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return next(model.parameters()).device


def leaf_of(parameter: Tensor) -> Tensor:
    """The tensor that gradients flow to when the model runs. Its values come and go."""
    return getattr(parameter, _LEAF, parameter)


def set_leaf(parameter: Tensor, leaf: Tensor) -> None:
    """Note the tensor that stands in for a sharded parameter while its layer runs."""
    setattr(parameter, _LEAF, leaf)


def on_rest(model: nn.Module, rest: Callable[[], None]) -> None:
    """Note how a sharded model is put to rest (`at_rest`)."""
    vars(model)[_REST] = rest


def at_rest(model: nn.Module) -> None:
    """Free whole weights that a pass which failed has left behind: only shards are in place."""
    rest = vars(model).get(_REST)
    if rest is not None:
        rest()


def local_of(tensor: Any) -> Any:
    """The rows that this rank holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole_of(tensor: Any) -> Any:
    """All rows. If the tensor is divided, every rank must ask, for the same tensors in order."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def own_rows(value: Tensor, parameter: Any) -> Tensor:
    """This rank's rows of a whole tensor of the parameter's shape."""
    mesh = parameter.device_mesh
    full = -(-len(value) // mesh.size())
    first = min(mesh.get_local_rank() * full, len(value))
    return value[first : first + full].clone()


def put_whole(parameter: Tensor, value: Tensor) -> None:
    """Set a parameter, or this rank's rows of it, from the whole value."""
    with torch.no_grad():
        if is_shard(parameter):
            sharded: Any = parameter
            sharded.to_local().copy_(own_rows(value, parameter))
        else:
            parameter.copy_(value)
