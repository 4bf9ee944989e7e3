"""A user's gradient in float32 of a model whose weights are narrower, one layer at a time.

In bfloat16 two right ways to compute a gradient differ by a tenth in a model of billions of
weights. Which differences are rounding, only a wider computation can tell. A copy of such a model
in float32 would not fit beside it, so each layer's weights are widened for its own forward pass,
and once more when the backward pass comes to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from userdp.updates import Batch, RecordLoss, Update, wide_dtype


def wide_gradient(
    model: nn.Module, parameters: Sequence[nn.Parameter], group: Batch, *, record_loss: RecordLoss
) -> Update:
    """The gradient of the mean of the records' losses, every product in float32 or wider."""
    device = parameters[0].device.type
    with torch.enable_grad(), torch.autocast(device, enabled=False):
        leaves = {id(p): p.detach().to(wide_dtype(p.dtype)).requires_grad_() for p in parameters}
        with _widened(model, leaves):
            loss = record_loss(model, group).mean()
            wide = [leaves[id(parameter)] for parameter in parameters]
            # A weight that is read outside its layer is met as it is.
            found = torch.autograd.grad(loss, [*wide, *parameters], allow_unused=True)
    through, past = found[: len(wide)], found[len(wide) :]
    return [
        sum((part.to(leaf.dtype) for part in (a, b) if part is not None), torch.zeros_like(leaf))
        for leaf, a, b in zip(wide, through, past, strict=True)
    ]


@contextlib.contextmanager
def _widened(model: nn.Module, leaves: dict[int, Tensor]) -> Iterator[None]:
    """Every layer computes with wide weights; frozen ones are not kept for the backward pass."""
    # By the address of their memory: the weights that are wide at this moment.
    narrow_of: dict[int, Tensor] = {}
    held: dict[nn.Module, tuple[dict[str, Any], list[int]]] = {}

    def widen(module: nn.Module, args: Any, kwargs: Any) -> Any:
        before = dict(module._parameters)
        addresses: list[int] = []
        for name, weight in before.items():
            if weight is None or not weight.is_floating_point():
                continue
            wide = leaves.get(id(weight))
            if wide is None:
                wide = weight.detach().to(wide_dtype(weight.dtype))
                if wide.dtype != weight.dtype:
                    addresses.append(wide.untyped_storage().data_ptr())
                    narrow_of[addresses[-1]] = weight
            module._parameters[name] = wide  # type: ignore[assignment]
        held[module] = before, addresses
        # A caller may have narrowed the input to what it takes the weight for.
        return pytree.tree_map(_wide, (args, kwargs))

    def put_back(module: nn.Module, *_: Any) -> None:
        before, addresses = held.pop(module)
        module._parameters.update(before)
        for address in addresses:
            narrow_of.pop(address, None)

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

    owners = [module for module in model.modules() if module._parameters]
    handles = [module.register_forward_pre_hook(widen, with_kwargs=True) for module in owners]
    # Also after a forward pass that raises: the weights must not stay as they are.
    handles += [module.register_forward_hook(put_back, always_call=True) for module in owners]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        for handle in handles:
            handle.remove()
        for module in [*held]:
            put_back(module)


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(wide_dtype(value.dtype))
    return value
