"""Many users' LoRA adapters in one model: each row of a batch goes through those of its user.

A batch holds as many rows of each user as of every other. The base model runs once for all of them;
only the two thin products of each adapter are taken user by user, as one batched product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

LORA_PARTS = ("lora_A", "lora_B")


class UnstackableError(Exception):
    """A layer does not see the rows of a batch one by one, so users cannot share the batch."""


class StackedLinear(nn.Module):
    """A linear layer without bias that has one weight per user: (user, out, in)."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        # peft asks a layer for the dtype of its `weight`.
        self.weight = weight

    def forward(self, rows: Tensor) -> Tensor:
        """Rows (user times row, token, in), those of a user side by side, to (..., out)."""
        users = self.weight.shape[0]
        if rows.dim() != 3 or rows.shape[0] % users:
            # An expert, for instance, gets single tokens of any row.
            raise UnstackableError
        by_user = rows.reshape(users, -1, rows.shape[-1])
        out = torch.bmm(by_user, self.weight.transpose(1, 2).to(rows.dtype))
        return out.reshape(*rows.shape[:-1], -1)


def adapter_layers(model: nn.Module) -> dict[str, nn.Linear] | None:
    """The trained layers of every LoRA adapter, by the name of their weight: both, or B alone.

    None if something else is trained, too: whole weights, biases, embeddings, other adapters.
    """
    found: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        is_part = any(part in name.split(".") for part in LORA_PARTS)
        if not is_part or not isinstance(module, nn.Linear) or module.bias is not None:
            continue
        # A may be frozen; then all users share it.
        if module.weight.requires_grad:
            found[f"{name}.weight"] = module
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return found if trained and trained == found.keys() else None


@contextlib.contextmanager
def stacked(model: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """Inside, the adapters have the given weights, one for each user; outside, their own."""
    own: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for name, weight in weights.items():
            parent, _, place = name.removesuffix(".weight").rpartition(".")
            holder = model.get_submodule(parent)
            own.append((holder, place, holder.get_submodule(place)))
            holder._modules[place] = StackedLinear(weight)
        yield
    finally:
        for holder, place, layer in own:
            holder._modules[place] = layer
