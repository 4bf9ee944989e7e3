"""From the norm of an update to the factor it is scaled by; shared by the plain and fast paths."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from userdp.clipping.rules import ClipRule

# Scaled updates aim this many roundings below the bound, so that rounding cannot carry them over:
# one part in a million in float32.
ROUNDING_MARGIN = 8
# Updates of a larger norm count as zero on both paths: its square nears the largest float32, where
# one path would still clip what the other no longer can.
LARGEST_NORM = 2.0**60
# In `rounding_factors`: factors that are tried, and roundings to expect, in eps, of the first; and
# how much more than expected is allowed for.
_CANDIDATES = 32
_LEAST_ROUNDING = 0.18
_MORE_THAN_EXPECTED = 1.1
# Leading digits that are tried at the same time, of all factors together.
_MOST_AT_ONCE = 2**19


def clip_factors(
    squared_norms: Tensor, rule: ClipRule, *, margin: float, clip_norm: Tensor | float | None = None
) -> Tensor:
    """The factor of every layer and user; `squared_norms` is (layers, users), or (1, users) flat.

    `clip_norm` stands in for the rule's own where it lives on the device: a captured step reads it
    there.

    Guarantee: the scaled updates have norm at most (1 - margin) times the rule's bound, all layers
    together. A user with a norm that is not finite, or above `LARGEST_NORM`, gets zero everywhere:
    nobody can poison the sum.
    """
    norms = squared_norms.clamp(min=0).sqrt()
    norm_bound = rule.clip_norm if clip_norm is None else clip_norm
    layers = math.sqrt(len(squared_norms)) if rule.by_layer else 1.0
    factors = rule.factor(norms, norm_bound, (1 - margin) / layers)
    # Whatever the rule says, nobody gets beyond its bound.
    most = largest_norm(rule, norm_bound) / layers / norms
    factors = torch.minimum(torch.maximum(factors, -most), most)
    # Not a number is not below anything.
    counts = (squared_norms <= LARGEST_NORM**2) & torch.isfinite(factors)
    return torch.where(counts.all(0, keepdim=True), factors, 0.0)


def power_of_two_below(factors: Tensor) -> Tensor:
    """The largest powers of two that are not above the factors: scaling by them rounds nothing."""
    wide = factors.dtype == torch.float64
    exponent = 0x7FF0000000000000 if wide else 0x7F800000
    bits = factors.contiguous().view(torch.int64 if wide else torch.int32)
    return (bits & exponent).view(factors.dtype)


def rounding_factors(factors: Tensor, exposed: Tensor, dtype: torch.dtype) -> Tensor:
    """Factors at most these, by which values of `dtype` usually stay within them once rounded.

    `exposed` is how far rounding by eps, of all values, would move the user's sum, relative to it.
    How a factor rounds depends on it: most do so as often up as down, by 0.2 eps as a root of mean
    squares. Near 1, 1/2, ... all values go the same way: by 0.999 no bfloat16 value changes at all.
    Of some factors that lie close together the largest is taken that leaves room for what it does
    to values with all leading digits; or a power of two, by which nothing is rounded.
    """
    eps = torch.finfo(dtype).eps
    most = round(_MOST_AT_ONCE * eps)
    parts = zip(factors.flatten().split(most), exposed.flatten().split(most), strict=True)
    return torch.cat([_rounding_factors(*part, dtype, eps) for part in parts]).view(factors.shape)


def _rounding_factors(factors: Tensor, exposed: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
    # Not for torch.compile, which leaves out roundings in the middle of a computation.
    steps = torch.arange(_CANDIDATES, dtype=factors.dtype, device=factors.device)
    first = factors / (1 + _LEAST_ROUNDING * exposed)
    candidates = first[:, None] * (1 - eps / _CANDIDATES * steps)
    candidates = torch.cat([candidates, power_of_two_below(factors)[:, None]], 1)
    one = round(1 / eps)
    digits = torch.arange(one, 2 * one, dtype=factors.dtype, device=factors.device)
    exact = candidates[..., None] * digits
    errors = (exact.to(dtype).to(factors.dtype) - exact) / exact
    # Values may have small or large leading digits.
    same_way = errors.unflatten(-1, (2, -1)).mean(-1).abs().amax(-1)
    rounding = errors.square().mean(-1).sqrt() / eps
    reached = candidates * (1 + same_way + _MORE_THAN_EXPECTED * rounding * exposed[:, None])
    best = torch.where(reached <= factors[:, None], candidates, 0.0).amax(1)
    best = torch.where(torch.isfinite(exposed), best, power_of_two_below(factors))
    return torch.where(exposed == 0, factors, best)


def largest_norm(rule: ClipRule, clip_norm: Tensor | float | None = None) -> Tensor | float:
    """The largest norm that a clipped update may have; `clip_norm` as in `clip_factors`."""
    return rule.bound if clip_norm is None else rule.bound_at(clip_norm)
