"""From the norm of an update to the factor it is scaled by; shared by the plain and fast paths."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from userdp.clipping.rules import AutomaticClip, ClipRule, NormalisedClip, PerLayerClip

# Scaled updates aim this many roundings below the bound, so that rounding cannot carry them over:
# one part in a million in float32.
ROUNDING_MARGIN = 8
# Factors that are tried in `evenly_rounding`, and how far above the norm asked for is still on it.
_CANDIDATES = 16
_HARDLY_ABOVE = 1e-6
# Leading digits that are tried at the same time, of all factors together.
_MOST_AT_ONCE = 2**21


def clip_factors(
    squared_norms: Tensor,
    rule: ClipRule,
    *,
    margin: Tensor | float,
    clip_norm: Tensor | float | None = None,
) -> Tensor:
    """The factor of every layer and user; `squared_norms` is (layers, users), or (1, users) flat.

    `clip_norm` stands in for the rule's own where it lives on the device: a captured step reads it
    there.

    Guarantee: the scaled updates have norm at most (1 - margin) times the rule's bound, all layers
    together; a margin for each layer and user is that of its share of the bound. A user with a norm
    that is not finite gets zero everywhere: nobody can poison the sum.
    """
    norms = squared_norms.clamp(min=0).sqrt()
    if isinstance(rule, AutomaticClip):
        factors = (1 - margin) / (norms + rule.stability)
    else:
        layers = len(squared_norms) if isinstance(rule, PerLayerClip) else 1
        norm_bound = rule.clip_norm if clip_norm is None else clip_norm
        bound = norm_bound * (1 - margin) / math.sqrt(layers)
        factors = torch.where(norms <= bound, 1.0, bound / norms)
        if isinstance(rule, NormalisedClip):
            factors = factors / norm_bound
    finite = torch.isfinite(squared_norms).all(0, keepdim=True)
    return torch.where(finite, factors, 0.0)


def evenly_rounding(factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Factors at most these, and hardly smaller, by which values of `dtype` scale without a bias.

    A product is rounded to the digits of its dtype. For most factors as many values are rounded up
    as down; near 1, 1/2, 3/4, ... all go one way: by 0.999 no bfloat16 value changes at all. Of a
    few factors that lie close together, the one is taken that comes nearest to the norm asked for
    without going above it, for values with small and for values with large leading digits.
    """
    eps = torch.finfo(dtype).eps
    most = round(_MOST_AT_ONCE * eps)
    parts = factors.flatten().split(most)
    return torch.cat([_evenly_rounding(part, dtype, eps) for part in parts]).view(factors.shape)


def _evenly_rounding(factors: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
    # Not for torch.compile, which leaves out roundings in the middle of a computation.
    steps = torch.arange(_CANDIDATES, dtype=factors.dtype, device=factors.device)
    candidates = factors[..., None] * (1 - eps / (2 * _CANDIDATES) * steps)
    one = round(1 / eps)
    digits = torch.arange(one, 2 * one, dtype=factors.dtype, device=factors.device)
    exact = candidates[..., None] * digits
    growth = (exact.to(dtype).to(factors.dtype) / exact).square()
    reached = candidates * growth.unflatten(-1, (2, -1)).mean(-1).amax(-1).sqrt()
    within = reached <= factors[..., None] * (1 + _HARDLY_ABOVE)
    best = torch.where(within, reached, -reached).argmax(-1, keepdim=True)
    return torch.where(factors > 0, candidates.gather(-1, best)[..., 0], factors)


def largest_norm(rule: ClipRule, clip_norm: Tensor | float | None = None) -> Tensor | float:
    """The largest norm that a clipped update may have; `clip_norm` as in `clip_factors`."""
    if isinstance(rule, AutomaticClip | NormalisedClip) or clip_norm is None:
        return rule.bound
    return clip_norm
