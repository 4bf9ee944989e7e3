"""Clip one update at a time and sum: the plain loop, the oracle of every faster path.

Norms are taken in float64 and values kept in float32 at least: a bf16 norm can exceed its bound by
one part in 128. The sum, not the mean, is what has a sensitivity; dividing comes after the noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from userdp.clipping.rules import FlatClip
from userdp.updates import Update, at_least_float32

# Clipped updates aim this many roundings below the bound, so that rounding cannot carry them over:
# one part in a million in float32.
ROUNDING_MARGIN = 8


def clip_update(update: Sequence[Tensor], rule: FlatClip) -> Update:
    """The update scaled so that its L2 norm over all tensors together is at most the clip norm.

    Guarantee: the norm of what is returned, measured exactly, is at most `rule.clip_norm`; an
    update with a value that is not finite gives zero, so that nobody can poison the sum.
    Reference: McMahan et al. 2018, Eq. 1.

    >>> clip_update([torch.tensor([3.0, 4.0])], FlatClip(clip_norm=1.0))
    [tensor([0.6000, 0.8000])]
    >>> clip_update([torch.tensor([float("nan"), 4.0])], FlatClip(clip_norm=1.0))
    [tensor([0., 0.])]
    """
    wide = [at_least_float32(tensor) for tensor in update]
    norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in wide])
    )
    bound = rule.clip_norm * (1 - ROUNDING_MARGIN * max(torch.finfo(t.dtype).eps for t in wide))
    factor = torch.where(norm <= bound, 1.0, bound / norm)
    finite = torch.isfinite(norm)
    return [torch.where(finite, tensor * _rounded_down(factor, tensor), 0.0) for tensor in wide]


def _rounded_down(factor: Tensor, like: Tensor) -> Tensor:
    """The factor in the tensor's dtype, never above it: a tiny one has few float32 digits."""
    narrow = factor.to(like.dtype)
    return torch.where(narrow > factor, torch.nextafter(narrow, torch.zeros_like(narrow)), narrow)


def clipped_sum(updates: Iterable[Update], rule: FlatClip, *, like: Sequence[Tensor]) -> Update:
    """The sum of the clipped updates; of none, zeros shaped `like` the parameters.

    Guarantee: adding or removing one update moves the sum by at most `rule.clip_norm`.
    """
    total = [torch.zeros_like(at_least_float32(tensor)) for tensor in like]
    for update in updates:
        for running, clipped in zip(total, clip_update(update, rule), strict=True):
            running += clipped
    return total
