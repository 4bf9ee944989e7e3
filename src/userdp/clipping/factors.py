"""From the norm of an update to the factor it is scaled by; shared by the plain and fast paths."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from userdp.clipping.rules import AutomaticClip, ClipRule, NormalisedClip, PerLayerClip

# Scaled updates aim this many roundings below the bound, so that rounding cannot carry them over:
# one part in a million in float32.
ROUNDING_MARGIN = 8


def clip_factors(
    squared_norms: Tensor, rule: ClipRule, *, margin: float, clip_norm: Tensor | float | None = None
) -> Tensor:
    """The factor of every layer and user; `squared_norms` is (layers, users), or (1, users) flat.

    `clip_norm` stands in for the rule's own where it lives on the device: a captured step reads it
    there.

    Guarantee: the scaled updates have norm at most (1 - margin) times the rule's bound, all layers
    together. A user with a norm that is not finite gets zero everywhere: nobody can poison the sum.
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


def largest_norm(rule: ClipRule, clip_norm: Tensor | float | None = None) -> Tensor | float:
    """The largest norm that a clipped update may have; `clip_norm` as in `clip_factors`."""
    if isinstance(rule, AutomaticClip | NormalisedClip) or clip_norm is None:
        return rule.bound
    return clip_norm
