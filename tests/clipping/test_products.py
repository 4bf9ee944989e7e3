"""Users' products and the norms that come with them."""

from __future__ import annotations

import pytest
import torch

from userdp.clipping.products import can_square, num_tiles, products_with_squares, users_products

ENDS = [3, 3, 9, 12]


def factors(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(12, 5, dtype=dtype), torch.randn(12, 7, dtype=dtype)


def test_users_products_are_those_of_their_own_tokens() -> None:
    a, b = factors()
    equal = torch.einsum("uti,utj->uij", a.view(4, 3, 5), b.view(4, 3, 7))
    torch.testing.assert_close(users_products(a, b, 4), equal)
    found = users_products(a, b, 4, torch.tensor(ENDS, dtype=torch.int32))
    for user, (first, last) in enumerate(zip([0, *ENDS], ENDS, strict=False)):
        torch.testing.assert_close(found[user], a[first:last].T @ b[first:last])


@pytest.mark.parametrize("ends", [None, ENDS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_squares_are_those_of_the_values_returned(
    dtype: torch.dtype, ends: list[int] | None
) -> None:
    a, b = factors(dtype)
    given = (a, b, 4, None if ends is None else torch.tensor(ends, dtype=torch.int32))
    products, squares = products_with_squares(*given)
    assert torch.equal(products, users_products(*given))
    assert squares.shape == (num_tiles(5, 7), 4)
    expected = products.double().square().sum((1, 2))
    torch.testing.assert_close(squares.sum(0).double(), expected, rtol=1e-6, atol=0)
    # What a compiler is told of shapes and dtypes is what comes.
    torch.library.opcheck(products_with_squares, given)


def test_squares_are_not_taken_where_no_kernel_is_made_for_it() -> None:
    how = {"tokens": 64, "dtype": torch.bfloat16, "device": torch.device("cpu")}
    assert not can_square(768, 3072, **how)
