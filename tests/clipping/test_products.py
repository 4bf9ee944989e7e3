"""Users' products and the norms that come with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from userdp.clipping import products
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
    found, squares = products_with_squares(*given)
    assert torch.equal(found, users_products(*given))
    assert squares.shape == (num_tiles(5, 7), 4)
    expected = found.double().square().sum((1, 2))
    torch.testing.assert_close(squares.sum(0).double(), expected, rtol=1e-6, atol=0)
    # What a compiler is told of shapes and dtypes is what comes.
    torch.library.opcheck(products_with_squares, given)


def by_torch(a: torch.Tensor, b: torch.Tensor, users: int, ends: torch.Tensor) -> Any:
    """What the kernel should return; of a user without tokens anything."""
    found, squares = products_with_squares(a, b, users, ends)
    found[ends.diff(prepend=ends.new_zeros(1)) == 0] = torch.nan
    return found, squares


def too_small_a_norm(*given: Any) -> Any:
    found, squares = by_torch(*given)
    return found, squares * 0.999


def wrong_user(*given: Any) -> Any:
    found, squares = by_torch(*given)
    return found.roll(1, 0), squares.roll(1, 1)


def broken(*given: Any) -> Any:
    raise RuntimeError("no such instruction")


@pytest.mark.parametrize("kernel", [too_small_a_norm, wrong_user, broken])
def test_a_kernel_that_fails_its_trial_is_not_used(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = products._hopper_works.__wrapped__
    monkeypatch.setattr(
        products, "_hopper", lambda: SimpleNamespace(products_with_squares=by_torch)
    )
    assert trial(torch.device("cpu"))
    monkeypatch.setattr(products, "_hopper", lambda: SimpleNamespace(products_with_squares=kernel))
    with pytest.warns(UserWarning, match="taken apart"):
        assert not trial(torch.device("cpu"))


@pytest.mark.parametrize(
    ("shape", "change", "wanted"),
    [
        ((768, 3072), {}, True),
        ((768, 3072), {"tokens": 96}, False),
        ((768, 3072), {"dtype": torch.float32}, False),
        ((768, 3072), {"device": torch.device("cpu")}, False),
        ((768, 3075), {}, False),
        # LoRA's thin weights fill a quarter of their tiles.
        ((32, 768), {}, False),
    ],
)
def test_squares_are_taken_where_the_kernel_is_made_for_it(
    shape: tuple[int, int],
    change: dict[str, Any],
    wanted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(products, "_hopper_works", lambda device: True)
    how = {"tokens": 64, "dtype": torch.bfloat16, "device": torch.device("cuda")} | change
    assert can_square(*shape, **how) == wanted
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not can_square(*shape, **how)
