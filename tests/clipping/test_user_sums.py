"""Sums over users' tokens; the CUDA kernel is compared with torch in `test_triton_kernels`."""

from __future__ import annotations

import math

import pytest
import torch

from userdp.clipping.kernels.user_sums import user_sums

COUNTS = [3, 0, 1, 5]


def drawn(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # One token behind the last user's.
    shape = (2, sum(COUNTS) + 1, 7)
    values, others = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return values.to(dtype), others.to(dtype), torch.tensor(COUNTS).cumsum(0).int()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_user_has_the_sum_over_its_own_tokens(dtype: torch.dtype) -> None:
    values, others, ends = drawn(dtype)
    sums, products = user_sums(values, others, ends)
    assert sums.dtype == products.dtype == torch.promote_types(dtype, torch.float32)
    for whole, found in ((values.double(), sums), (values.double() * others.double(), products)):
        expected = torch.stack([part.sum(0) for part in whole[:-1].split(COUNTS)])
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    only, none = user_sums(values, None, ends)
    assert torch.equal(only, sums)
    assert none.shape == (0, 7)


def test_a_value_that_is_not_finite_stays_with_its_user() -> None:
    values, others, ends = drawn(torch.float32)
    values[0] = math.inf
    for found in user_sums(values, others, ends):
        assert not found[0].isfinite().any()
        assert found[1:].isfinite().all()


def test_compiled_code_is_told_the_right_shapes_and_dtypes() -> None:
    values, others, ends = drawn(torch.bfloat16)
    torch.library.opcheck(user_sums, (values, others, ends))
    torch.library.opcheck(user_sums, (values, None, ends))
