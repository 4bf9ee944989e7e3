"""Factors by which half-precision values scale without a bias."""

from __future__ import annotations

import pytest
import torch

from userdp.clipping.factors import evenly_rounding

DTYPES = [torch.bfloat16, torch.float16]


def hard_factors() -> torch.Tensor:
    """Factors of all sizes, and many where every rounding goes the same way."""
    generator = torch.Generator().manual_seed(0)
    near = 1 - torch.rand(400, generator=generator) * 2**-8
    uniform = torch.rand(400, generator=generator) * 0.99 + 0.01
    return torch.cat([uniform, near, near / 2, near * 0.75, near * 1e-6, torch.ones(1)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_factor_is_hardly_smaller_and_never_larger(dtype: torch.dtype) -> None:
    factors = hard_factors()
    found = evenly_rounding(factors, dtype)
    assert bool((found <= factors).all())
    assert bool((found >= factors * (1 - torch.finfo(dtype).eps / 2)).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_factor_lifts_a_norm_by_rounding(dtype: torch.dtype) -> None:
    # Seed 0 to 3. By 0.999 no bfloat16 value changes: the norm would be 0.1% too large.
    factors = hard_factors()
    above = 0.2 * torch.finfo(dtype).eps
    usual = factors > 1e-3
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(4000, generator=generator).to(dtype)
        assert float(lift(values, factors, factors)[usual].max()) > above
        even = evenly_rounding(factors, dtype)
        assert float(lift(values, factors, even)[usual].max()) < above / 8


def lift(values: torch.Tensor, asked: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """How far the norm of scaled and rounded values lies above the one asked for, relatively."""
    wide = values.float()
    rounded = (wide * used[:, None]).to(values.dtype).float()
    return rounded.norm(dim=1) / (asked * wide.norm()) - 1


def test_one_and_zero_stay_as_they_are() -> None:
    factors = torch.tensor([[0.0, 1.0, 0.5, 2.0]])
    assert torch.equal(evenly_rounding(factors, torch.bfloat16), factors)


def test_many_factors_are_done_in_parts() -> None:
    factors = torch.rand(3, 50_000, generator=torch.Generator().manual_seed(1))
    whole = evenly_rounding(factors, torch.bfloat16)
    assert torch.equal(whole[1, 100:103], evenly_rounding(factors[1, 100:103], torch.bfloat16))
