"""Memory that local steps use again and again, and the clipping that a step before left to do."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# From squared norms (parameters, users) to factors of the same shape.
Factors = Callable[[Tensor], Tensor]


# This many numbers are added up in their own precision before float64 takes over.
_SUMMED = 64


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


def settle_(theta_UGX: Tensor, start_GX: Tensor, factor_UG: Tensor) -> None:
    """theta^0 + factor (theta - theta^0) in place, for each user and each of G parts.

    A copy whose factor is one stays as it is.
    """
    for user, part in (factor_UG != 1).nonzero().tolist():
        own, start, factor = theta_UGX[user, part], start_GX[part], factor_UG[user, part]
        # What is not finite has the factor zero, and must not be multiplied by it.
        torch.lerp(start, own, factor, out=own) if factor > 0 else own.copy_(start)


def squared_norms(way: Tensor) -> Tensor:
    """The squared norms over the last dimension, in float64, without a copy in float64.

    Sums of 64 numbers are in the tensor's own dtype. That is off by a few roundings at most, which
    `factors.ROUNDING_MARGIN` has room for.
    """
    even = way.shape[-1] // _SUMMED * _SUMMED
    parts = way[..., :even].unflatten(-1, (-1, _SUMMED))
    squares = torch.linalg.vector_norm(parts, dim=-1).double().square().sum(-1)
    rest = torch.linalg.vector_norm(way[..., even:], dim=-1, dtype=torch.float64)
    return squares + rest.square()
