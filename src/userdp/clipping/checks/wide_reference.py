"""A user's gradient in float32, for a model whose weights are narrower, one layer at a time.

In bfloat16 two correct ways to compute a gradient differ by a tenth in a model of billions of
weights. Only a wider computation can tell which differences are rounding. A float32 copy of such a
model would not fit beside it. So each layer's weights are widened for its own forward pass, and
again when the backward pass reaches it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from userdp.losses import Batch, RecordLoss, Update, records_in, wide_dtype
from userdp.sharded_tensors import is_shard, leaf_of
from userdp.updates.scaled_gradient import Scales


def wide_gradient(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    group: Batch,
    *,
    record_loss: RecordLoss,
    microbatch_records: int | None = None,
    scales: Scales | None = None,
) -> Update:
    """The gradient of the mean of the records' losses, every product in float32 or wider.

    With `scales`, it is scaled.
    """
    rows = records_in(group)
    size = microbatch_records or max(1, rows)
    total: Update = []
    for start in range(0, max(1, rows), size):
        part = {name: tensor[start : start + size] for name, tensor in group.items()}
        share = records_in(part) / max(1, rows)
        found = _gradient_of_part(model, parameters, part, record_loss)
        if scales is not None:
            found = scales.times(found)
        if not total and share in (0, 1):
            return found
        total = total or [torch.zeros_like(tensor) for tensor in found]
        for running, tensor in zip(total, found, strict=True):
            running += share * tensor
    return total


def _gradient_of_part(
    model: nn.Module, parameters: Sequence[nn.Parameter], group: Batch, record_loss: RecordLoss
) -> Update:
    device = parameters[0].device.type
    # The values of a sharded weight are there only while its layer runs: its wide copy is made then
    # and holds no value before.
    leaves = {
        id(leaf_of(p)): torch.zeros_like(leaf_of(p), dtype=wide_dtype(p.dtype)).requires_grad_()
        if is_shard(p)
        else p.detach().to(wide_dtype(p.dtype)).requires_grad_()
        for p in parameters
    }
    with torch.enable_grad(), torch.autocast(device, enabled=False), _widened(model, leaves):
        wide = [leaves[id(leaf_of(parameter))] for parameter in parameters]
        loss = record_loss(model, group).mean()
        found = torch.autograd.grad(loss, wide, allow_unused=True)
    return [
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(wide, found, strict=True)
    ]


@contextlib.contextmanager
def _widened(model: nn.Module, leaves: dict[int, Tensor]) -> Iterator[None]:
    """Every layer computes with wide weights; those of frozen layers are not kept."""
    # The frozen weights that are wide at this moment, by the address of the wide copy.
    narrow_of: dict[int, Tensor] = {}
    held: dict[nn.Module, dict[str, Any]] = {}
    owners = [module for module in model.modules() if module._parameters]
    originals = {module: dict(module._parameters) for module in owners}

    def widen(module: nn.Module, args: Any, kwargs: Any) -> Any:
        held[module] = dict(module._parameters)
        for name, weight in held[module].items():
            if weight is None or not weight.is_floating_point():
                continue
            leaf = leaves.get(id(weight))
            if leaf is not None:
                # Only a sharded weight is still in its place.
                leaf.data.copy_(weight.detach())
                module._parameters[name] = leaf  # type: ignore[assignment]
                continue
            if wide_dtype(weight.dtype) == weight.dtype:
                continue
            wide = weight.detach().to(wide_dtype(weight.dtype))
            narrow_of[wide.untyped_storage().data_ptr()] = weight
            module._parameters[name] = wide  # type: ignore[assignment]
        # The model may have cast the input to the dtype that it expects of the weight.
        return pytree.tree_map(_wide, (args, kwargs))

    def put_back(module: nn.Module, *_: Any) -> None:
        for weight in module._parameters.values():
            if weight is not None:
                narrow_of.pop(weight.untyped_storage().data_ptr(), None)
        module._parameters.update(held.pop(module))

    def pack(tensor: Tensor) -> Any:
        weight = narrow_of.get(tensor.untyped_storage().data_ptr())
        if weight is None:
            return tensor
        return weight, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        weight, size, stride, offset = packed
        return weight.detach().to(wide_dtype(weight.dtype)).as_strided(size, stride, offset)

    handles = [module.register_forward_pre_hook(widen, with_kwargs=True) for module in owners]
    # Also after a forward pass that raises: wide weights must not stay in the model.
    handles += [module.register_forward_hook(put_back, always_call=True) for module in owners]
    try:
        for module in owners:
            for name, weight in originals[module].items():
                if id(weight) in leaves:
                    module._parameters[name] = leaves[id(weight)]  # type: ignore[assignment]
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        for handle in handles:
            handle.remove()
        for module, weights in originals.items():
            module._parameters.update(weights)


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(wide_dtype(value.dtype))
    return value
