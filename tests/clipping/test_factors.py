"""Factors by which half-precision values scale and stay within the norm asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from userdp.clipping import factors as factors_module
from userdp.clipping.factors import clip_factors, power_of_two_below, rounding_factors
from userdp.clipping.rules import FlatClip

DTYPES = [torch.bfloat16, torch.float16]


def hard_factors() -> torch.Tensor:
    """Factors of all sizes, and many where every rounding goes the same way."""
    generator = torch.Generator().manual_seed(0)
    near = 1 - torch.rand(400, generator=generator) * 2**-8
    uniform = torch.rand(400, generator=generator) * 0.99 + 0.01
    return torch.cat([uniform, near, near / 2, near * 0.75, near * 1e-6, torch.ones(1)])


def exposed(factors: torch.Tensor, dtype: torch.dtype, share: float = 1.0) -> torch.Tensor:
    """Sums of many tokens' values: rounding moves them by about what it moves a value by."""
    return torch.full_like(factors, share * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_factor_is_hardly_smaller_and_never_larger(dtype: torch.dtype) -> None:
    factors, eps = hard_factors(), torch.finfo(dtype).eps
    found = rounding_factors(factors, exposed(factors, dtype), dtype)
    assert bool((found <= factors).all())
    assert bool((found >= factors * (1 - 1.3 * eps)).all())
    # Most of all sizes are no smaller than what rounding needs.
    assert float((found / factors)[:400].median()) >= 1 - 0.3 * eps


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_stay_within_the_norm_asked_for_once_rounded(dtype: torch.dtype) -> None:
    # Seeds 0 and 1. By 0.999 no bfloat16 value changes: the norm would be 0.1% too large.
    factors, eps = hard_factors(), torch.finfo(dtype).eps
    usual = factors > 1e-3
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(4000, generator=generator).to(dtype)
        assert float(reached(values, factors, factors)[usual].max()) > 0.2 * eps
        found = rounding_factors(factors, exposed(factors, dtype), dtype)
        assert float(reached(values, factors, found)[usual].max()) <= 0


def reached(values: torch.Tensor, asked: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """How far norm and rounding errors together are above the norm asked for, relatively."""
    wide = values.float()
    scaled = wide * used[:, None]
    errors = scaled.to(values.dtype).float() - scaled
    return (scaled.norm(dim=1) + errors.norm(dim=1)) / (asked * wide.norm()) - 1


def test_one_and_zero_stay_as_they_are_and_so_does_what_is_not_rounded() -> None:
    factors = torch.tensor([[0.0, 1.0, 0.5, 2.0]])
    share = exposed(factors, torch.bfloat16)
    assert torch.equal(rounding_factors(factors, share, torch.bfloat16), factors)
    factors = torch.tensor([[0.3, 0.999]])
    assert torch.equal(rounding_factors(factors, 0 * factors, torch.bfloat16), factors)


@pytest.mark.parametrize("share", [0.5, 20.0, float("inf"), float("nan")])
def test_sums_that_are_mostly_rounding_get_a_power_of_two(share: float) -> None:
    factors = torch.tensor([[0.3, 0.999, 1.7]])
    found = rounding_factors(factors, torch.full_like(factors, share), torch.bfloat16)
    assert bool((found <= factors).all() and (found >= power_of_two_below(factors)).all())
    if share != 0.5:
        assert torch.equal(found, torch.tensor([[0.25, 0.5, 1.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_of_two(dtype: torch.dtype) -> None:
    factors = torch.tensor([0.0, 1.0, 0.999, 1e-30, 3e20, 0.125], dtype=dtype)
    found = power_of_two_below(factors)
    assert bool((found <= factors).all() and (2 * found >= factors).all())
    assert torch.equal(found[found > 0].log2(), found[found > 0].log2().round())


def test_many_factors_are_done_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[int] = []
    whole_part = factors_module._rounding_factors

    def counted(part: torch.Tensor, *others: Any) -> torch.Tensor:
        shapes.append(len(part))
        return whole_part(part, *others)

    monkeypatch.setattr(factors_module, "_rounding_factors", counted)
    at_once = 1000
    monkeypatch.setattr(factors_module, "_MOST_AT_ONCE", at_once / torch.finfo(torch.bfloat16).eps)
    factors = torch.rand(3, 500, generator=torch.Generator().manual_seed(1))
    share = exposed(factors, torch.bfloat16)
    whole = rounding_factors(factors, share, torch.bfloat16)
    assert shapes == [1000, 500]
    part = rounding_factors(factors[1, 100:103], share[1, 100:103], torch.bfloat16)
    assert torch.equal(whole[1, 100:103], part)


class BreaksItsWord(FlatClip):
    """A rule from elsewhere whose equation is wrong."""

    answer: float = 1.0
    by_layer = False

    def factor(self, norms: Any, clip_norm: Any, share: float) -> Any:
        return torch.full_like(norms, self.answer)


class BreaksItsWordByLayer(BreaksItsWord):
    """The same, where every layer is clipped on its own."""

    by_layer = True


@pytest.mark.parametrize("answer", [1.0, 1e6, -1.0, -1e6, float("inf"), float("nan")])
@pytest.mark.parametrize("kind", [BreaksItsWord, BreaksItsWordByLayer])
def test_a_rule_that_breaks_its_word_carries_nobody_beyond_its_bound(
    kind: type[BreaksItsWord], answer: float
) -> None:
    rule = kind(clip_norm=0.5)
    object.__setattr__(rule, "answer", answer)
    norms = torch.tensor([[0.0, 1e-3, 0.4, 3.0, 1e9]] * (3 if rule.by_layer else 1))
    for clip_norm in (None, torch.tensor(0.5)):
        factors = clip_factors(norms.square(), rule, margin=0.0, clip_norm=clip_norm)
        scaled = (factors * norms).double().norm(dim=0)
        assert bool(scaled.isfinite().all())
        assert float(scaled.max()) <= 0.5 * (1 + 1e-6)
