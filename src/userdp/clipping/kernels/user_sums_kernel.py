"""The CUDA kernel for `user_sums`: a program adds up some columns of one user's tokens.

Each sum has one writer and a fixed order, so equal inputs give equal sums.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens and columns that a program reads at a time, its warps, and how many reads are under way at
# once. Tuned on an H200.
_TOKENS = 64
_COLUMNS = 64
_WARPS = 4
_READS_AHEAD = tl.constexpr(3)


@triton.jit
def _user_sums_kernel(
    values,
    others,
    ends,
    sums,
    products,
    width,
    values_stride,
    others_stride,
    HAS_OTHERS: tl.constexpr,
    WIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    user = tl.program_id(1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    first = tl.load(ends + user - 1, user > 0, 0)
    last = tl.load(ends + user)
    total = tl.zeros((TOKENS, COLUMNS), WIDE)
    multiplied = tl.zeros((TOKENS, COLUMNS), WIDE)
    for start in tl.range(first, last, TOKENS, num_stages=_READS_AHEAD):
        tokens = start + tl.arange(0, TOKENS)
        read = (tokens < last)[:, None] & inside[None, :]
        place = tokens[:, None].to(tl.int64)
        value = tl.load(values + place * values_stride + columns[None, :], read, 0.0).to(WIDE)
        total += value
        if HAS_OTHERS:
            other = tl.load(others + place * others_stride + columns[None, :], read, 0.0)
            multiplied += value * other.to(WIDE)
    out = user.to(tl.int64) * width + columns
    tl.store(sums + out, tl.sum(total, 0), inside)
    if HAS_OTHERS:
        tl.store(products + out, tl.sum(multiplied, 0), inside)


def user_sums(
    values: Tensor, others: Tensor | None, ends: Tensor, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As `user_sums.user_sums`, in the `wide` dtype."""
    values = _in_order(values)
    second = values if others is None else _in_order(others)
    users, width = len(ends), values.shape[1]
    sums = values.new_empty(users, width, dtype=wide)
    products = values.new_empty(0 if others is None else users, width, dtype=wide)
    _user_sums_kernel[(triton.cdiv(width, _COLUMNS), users)](
        values,
        second,
        ends,
        sums,
        products,
        width,
        values.stride(0),
        second.stride(0),
        HAS_OTHERS=others is not None,
        WIDE=tl.float64 if wide == torch.float64 else tl.float32,
        TOKENS=_TOKENS,
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
    )
    return sums, products


def _in_order(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
