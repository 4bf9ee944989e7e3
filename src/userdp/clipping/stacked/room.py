"""Memory that local steps use again and again, and the clipping that a step before left to do."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# From squared norms (parameters, users) to factors of the same shape.
Factors = Callable[[Tensor], Tensor]


class Room:
    """Tensors by name. A tensor taken again under its name lies in the same memory."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape with any values."""
        size = math.prod(shape)
        held = self._held.get(name)
        if held is None or held.numel() < size:
            held = self._held[name] = self._like.new_empty(size)
        return held[:size].view(shape)


def settle_(theta: Tensor, start: Tensor, factor: Tensor) -> Tensor:
    """theta^0 + factor (theta - theta^0) in place; a factor of zero gives theta^0.

    `factor` has the first dimensions of `theta` that it differs over.
    """
    if not theta.is_cuda and bool((factor == 1).all()):
        return theta
    wide = factor.view(*factor.shape, *[1] * (theta.dim() - factor.dim()))
    # What is not finite has the factor zero, and must not be multiplied by it.
    moved = torch.where(wide > 0, theta - start, 0.0)
    return theta.copy_(moved.mul_(wide).add_(start))
