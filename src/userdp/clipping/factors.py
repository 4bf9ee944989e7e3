"""Computes the factor that an update is scaled by from its norm, for the plain and fast paths.

Why rounding cannot carry an update over its bound: docs/clipping.md, "Rounding", has the whole
argument in one place.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from userdp.clipping.rules import ClipRule
from userdp.errors import InputError

# Factors aim this many roundings below the bound, so that rounding cannot carry an update over it.
# In float32 this is one part in a million.
ROUNDING_MARGIN = 8
# An update with a larger norm counts as zero on both paths. Its square is near the largest float32.
# There, one path could still clip it when the other no longer can.
LARGEST_NORM = 2.0**60
# Computed shares of a bound may be off by this; far below what ROUNDING_MARGIN leaves room for.
_SHARES_ROUNDING = 1e-15
# `rounding_factors` tries this many factors for each given one.
_CANDIDATES = 32
# The largest factor tried leaves room for a root mean square rounding error of this many eps.
_LEAST_ROUNDING = 0.18
# The chosen factor leaves room for this many times its expected rounding error.
_MORE_THAN_EXPECTED = 1.1
# Each candidate is tried on all leading digits. This bounds how many are tried at once, over all
# given factors together.
_MOST_AT_ONCE = 2**19


def clip_factors(
    squared_norms: Tensor, rule: ClipRule, *, margin: float, clip_norm: Tensor | float | None = None
) -> Tensor:
    """The factor of every layer and user; `squared_norms` is (layers, users), or (1, users) flat.

    `clip_norm` replaces the rule's own if it lives on the device: a captured step reads it there.

    Guarantee: a user's scaled update has norm at most (1 - margin) times the rule's bound, over all
    layers together. A user with a norm that is not finite, or above `LARGEST_NORM`, gets zero in
    every layer: nobody can poison the sum.
    """
    norms = squared_norms.clamp(min=0).sqrt()
    norm_bound = rule.clip_norm if clip_norm is None else clip_norm
    share = _shares(rule, norms)
    factors = rule.factor(norms, norm_bound, (1 - margin) * share)
    # Enforce the bound, whatever factor the rule returns.
    most = largest_norm(rule, norm_bound) * share / norms
    factors = torch.minimum(torch.maximum(factors, -most), most)
    # NaN fails the comparison, so such a user does not count.
    counts = (squared_norms <= LARGEST_NORM**2) & torch.isfinite(factors)
    return torch.where(counts.all(0, keepdim=True), factors, 0.0)


def _shares(rule: ClipRule, norms: Tensor) -> Any:
    """The part of the bound that each layer may use: a number, or one for each (layers, 1)."""
    shares = rule.shares(len(norms))
    if len(shares) != len(norms) or not math.hypot(*shares) <= 1 + _SHARES_ROUNDING:
        raise InputError(
            f"{rule.name} clipping gives {len(norms)} layers more than its whole bound: one user "
            "would move the sum too far. The squares of a rule's shares must sum to 1."
        )
    if len(set(shares)) == 1:
        return shares[0]
    # Filled one by one: nothing may be sent from the host while a graph is captured.
    return torch.stack([torch.full_like(norms[0, :1], share) for share in shares])


def power_of_two_below(factors: Tensor) -> Tensor:
    """The largest power of two that is at most each factor. Scaling by it rounds nothing."""
    wide = factors.dtype == torch.float64
    exponent = 0x7FF0000000000000 if wide else 0x7F800000
    bits = factors.contiguous().view(torch.int64 if wide else torch.int32)
    return (bits & exponent).view(factors.dtype)


def rounding_factors(factors: Tensor, exposed: Tensor, dtype: torch.dtype) -> Tensor:
    """Factors at most these, with room for rounding the scaled values to `dtype`.

    Values of `dtype` that are scaled by a returned factor, and then rounded, usually stay within
    what the given factor allows. `exposed` is how far the user's sum would move, relative to its
    norm, if all values were rounded by eps.

    How values are rounded depends on the factor. Most factors round values up as often as down, by
    0.2 eps as a root mean square. Near 1, 1/2, ... a factor rounds all values in the same
    direction: 0.999 changes no bfloat16 value at all. So some factors that lie close together are
    tried on values with all leading digits. The largest one that leaves enough room is returned, or
    else a power of two, which rounds nothing. See docs/clipping.md, "Rounding".
    """
    eps = torch.finfo(dtype).eps
    most = round(_MOST_AT_ONCE * eps)
    parts = zip(factors.flatten().split(most), exposed.flatten().split(most), strict=True)
    return torch.cat([_rounding_factors(*part, dtype, eps) for part in parts]).view(factors.shape)


def _rounding_factors(factors: Tensor, exposed: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
    # Must not be compiled: torch.compile leaves out roundings in the middle of a computation.
    steps = torch.arange(_CANDIDATES, dtype=factors.dtype, device=factors.device)
    first = factors / (1 + _LEAST_ROUNDING * exposed)
    candidates = first[:, None] * (1 - eps / _CANDIDATES * steps)
    candidates = torch.cat([candidates, power_of_two_below(factors)[:, None]], 1)
    one = round(1 / eps)
    digits = torch.arange(one, 2 * one, dtype=factors.dtype, device=factors.device)
    exact = candidates[..., None] * digits
    errors = (exact.to(dtype).to(factors.dtype) - exact) / exact
    # A user's values may mostly have small leading digits, or mostly large ones. Take the worse
    # half.
    same_way = errors.unflatten(-1, (2, -1)).mean(-1).abs().amax(-1)
    rounding = errors.square().mean(-1).sqrt() / eps
    reached = candidates * (1 + same_way + _MORE_THAN_EXPECTED * rounding * exposed[:, None])
    best = torch.where(reached <= factors[:, None], candidates, 0.0).amax(1)
    best = torch.where(torch.isfinite(exposed), best, power_of_two_below(factors))
    return torch.where(exposed == 0, factors, best)


def largest_norm(rule: ClipRule, clip_norm: Tensor | float | None = None) -> Tensor | float:
    """The largest norm that a clipped update may have. `clip_norm` is as in `clip_factors`."""
    return rule.bound if clip_norm is None else rule.bound_at(clip_norm)
