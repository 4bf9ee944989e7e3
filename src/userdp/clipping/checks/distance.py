"""How far two updates are apart, one tensor at a time: a whole difference may not fit in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def norm_of(tensors: Sequence[Tensor]) -> float:
    """The norm of all tensors together, added up in float64."""
    return _together([_norm(tensor) for tensor in tensors])


def distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The norm of the difference, which is computed where the expected tensors are."""
    movement, _ = distances(found, expected)
    return movement


def distances(
    found: Sequence[Tensor], before: Sequence[Tensor], own: Sequence[Tensor] | None = None
) -> tuple[float, float]:
    """The norms of found - before, and of found - before - own."""
    moved: list[float] = []
    rest: list[float] = []
    for place, (now, then) in enumerate(zip(found, before, strict=True)):
        difference = now.detach().to(then.device) - then
        moved.append(_norm(difference))
        rest.append(moved[-1] if own is None else _norm(difference - own[place]))
    return _together(moved), _together(rest)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))


def _together(norms: Sequence[float]) -> float:
    # What is not a number stays so: the hypotenuse of NaN and infinity would be infinity.
    return math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)
