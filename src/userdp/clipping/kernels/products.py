"""Every user's product a_u^T b_u: its stored gradient of a linear layer.

In both factors the users' tokens lie one after the other. All users have the same number of tokens,
or user u's tokens end at `ends[u]`; those behind the last user's are left out.
"""

from __future__ import annotations

import importlib
import itertools
import warnings
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from userdp.losses import wide_dtype

# CUDA's grouped products want whole vectors of 16 bytes.
_ALIGNMENT = 8
# CUDA kernels take this many tokens at a time, all of one user, so rows are multiples of it.
TOKENS_OF_ONE_USER = 32
# In `products_with_squares` a tile has TILE by TILE values of a gradient. The first of DEPTHS that
# divides the tokens of every user is how many are multiplied at a time.
TILE = 128
DEPTHS = (64, TOKENS_OF_ONE_USER)
_HALVES = (torch.bfloat16, torch.float16)
# Tiles reach beyond the gradient's edge. They pay if at least this share of their values is inside.
_LEAST_FILLED = 0.75


def users_products(a: Tensor, b: Tensor, users: int, ends: Tensor | None = None) -> Tensor:
    """(users, columns of a, columns of b) from (tokens, columns)."""
    if ends is None:
        return torch.bmm(a.unflatten(0, (users, -1)).mT, b.unflatten(0, (users, -1)))
    if a.is_cuda:
        unaligned = [-matrix.shape[1] % _ALIGNMENT for matrix in (a, b)]
        if any(unaligned):
            first, second = a.shape[1], b.shape[1]
            a, b = (F.pad(m, (0, extra)) for m, extra in zip((a, b), unaligned, strict=True))
            return F.grouped_mm(a.t(), b, offs=ends)[:, :first, :second].contiguous()
        return F.grouped_mm(a.t(), b, offs=ends)
    starts = [0, *ends.tolist()]
    return torch.stack([a[i:j].t() @ b[i:j] for i, j in itertools.pairwise(starts)])


def can_square(
    rows: int, columns: int, *, tokens: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether `products_with_squares` works for gradients of this shape and is faster.

    `tokens` divides the number of tokens of every user.
    """
    filled = rows * columns / (num_tiles(rows, columns) * TILE**2)
    depth = depth_of(tokens)
    return (
        device.type == "cuda"
        and dtype in _HALVES
        and depth is not None
        and rows % _ALIGNMENT == columns % _ALIGNMENT == 0
        and filled >= _LEAST_FILLED
        and torch.cuda.get_device_capability(device) == (9, 0)
        and _hopper_works(device, dtype, depth)
    )


def depth_of(divisor: int) -> int | None:
    """How many tokens are multiplied at a time; None if no number divides those of every user."""
    return next((depth for depth in DEPTHS if divisor % depth == 0), None)


def num_tiles(rows: int, columns: int) -> int:
    """Tiles of one user's gradient."""
    return -(-rows // TILE) * -(-columns // TILE)


@torch.library.custom_op(
    "userdp::products_with_squares",
    mutates_args=(),
    schema="(Tensor a, Tensor b, SymInt users, Tensor? ends, int divisor) -> (Tensor, Tensor)",
)
def products_with_squares(
    a: Tensor, b: Tensor, users: int, ends: Tensor | None, divisor: int
) -> tuple[Tensor, Tensor]:
    """`users_products`, and the squared norms of their tiles (tiles, users), in float32 at least.

    The norms are those of exactly the values returned. For a user without tokens they are zero,
    while its values may be anything. `divisor` divides the number of tokens of every user.
    """
    depth = depth_of(divisor)
    if a.is_cuda and a.dtype in _HALVES and depth is not None:
        return _hopper().products_with_squares(a, b, users, ends, depth=depth)
    products = users_products(a, b, users, ends)
    rows, columns = products.shape[1:]
    wide = F.pad(products.to(wide_dtype(products.dtype)), (0, -columns % TILE, 0, -rows % TILE))
    tiles = wide.unflatten(2, (-1, TILE)).unflatten(1, (-1, TILE))
    return products, tiles.square().sum((2, 4)).flatten(1).T.contiguous()


@products_with_squares.register_fake
def _(a: Tensor, b: Tensor, users: int, ends: Tensor | None, divisor: int) -> tuple[Tensor, Tensor]:
    rows, columns = a.shape[1], b.shape[1]
    squares = a.new_empty(num_tiles(rows, columns), users, dtype=wide_dtype(a.dtype))
    return a.new_empty(users, rows, columns), squares


@cache
def _hopper_works(device: torch.device, dtype: torch.dtype, depth: int) -> bool:
    """Whether the kernel gives the right products on this device, by a small trial.

    Only two programs share the work, so that each part of the kernel takes many turns.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(12 * depth, width, generator=generator).to(dtype)
        for width in (TILE + _ALIGNMENT, 3 * TILE)
    )
    # The second user has no tokens.
    ends = torch.tensor([7, 7, 12], dtype=torch.int32) * depth
    try:
        for own_ends in (None, ends):
            with torch.autocast("cpu", enabled=False):
                expected = users_products(a.float(), b.float(), 3, own_ends)
            found = _hopper().products_with_squares(
                a.to(device),
                b.to(device),
                3,
                None if own_ends is None else own_ends.to(device),
                depth=depth,
                programs=2,
            )
            products, squares = (tensor.float().cpu() for tensor in found)
            if own_ends is not None:
                products[1] = 0
            torch.testing.assert_close(products, expected, rtol=1e-2, atol=1e-2)
            norms = products.square().sum((1, 2))
            torch.testing.assert_close(squares.sum(0), norms, rtol=1e-5, atol=0)
    except torch.OutOfMemoryError:
        # This says nothing about the kernel.
        raise
    except Exception as error:
        warnings.warn(
            f"Norms are taken apart from products, which takes some time: {error!r}", stacklevel=2
        )
        if device.type == "cuda":
            # Raises if the device has stopped working.
            torch.cuda.synchronize(device)
        return False
    return True


def _hopper() -> Any:
    return importlib.import_module("userdp.clipping.kernels.hopper")
