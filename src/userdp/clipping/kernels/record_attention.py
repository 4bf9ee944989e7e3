"""CUDA kernels: causal attention within records that lie one after the other.

The tokens of all rows form one line, and a record may reach from one row into the next. Token i is
the `position[i]`-th of its record, counted from 0, and `left[i]` tokens of the record follow it (-1
for padding). It sees itself and the earlier tokens of its record. So a tile of queries needs keys
from where the record of its first token begins, and a tile of keys needs queries up to the end of
the record of its last one. No mask is read, and no probability is stored: the backward pass
computes them again (Dao et al. 2022).

A program holds a tile of TILE tokens, which may be those of two users, and goes through the other
side STEP tokens at a time, which are one user's: users begin at multiples of STEP. A token that is
not finite must not reach another user, and zero times it is not zero. So what a token adds up from
STEP tokens counts only if it sees one of them. These are then its own user's.

Sums are added up in a fixed order, so that equal inputs give equal outputs to the last bit.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from userdp.clipping.kernels.products import TOKENS_OF_ONE_USER

# Tokens of a tile. Wide heads have smaller ones, to fit into shared memory.
_TILE = 64
_TILE_OF_WIDE = 32
_WIDE = 128
# Tokens of the other side at a time.
STEP = TOKENS_OF_ONE_USER
_LOG2_E = math.log2(math.e)
_NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _tile(
    ptr, numbers, head, length, row_stride, head_stride, token_stride, mask, PADDED: tl.constexpr
):
    """The values of the tokens of these numbers, from a tensor of (rows, heads, length, width)."""
    rows = (numbers // length).to(tl.int64)
    place = rows * row_stride + head * head_stride + (numbers % length) * token_stride
    return tl.load(ptr + place[:, None] + tl.arange(0, PADDED)[None, :], mask=mask, other=0.0)


@triton.jit
def _if_any(values, sees):
    """The values of the tokens that see anything, and zero for the others, whatever is there."""
    return tl.where((tl.max(sees.to(tl.int32), 1) > 0)[:, None], values, 0.0)


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, position_ptr, out_ptr, lse_ptr,
    q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token,
    tokens, length, heads, scale,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, PADDED)
    query = tile * TILE + tl.arange(0, TILE)
    is_query = query < tokens
    start = query - tl.load(position_ptr + query, mask=is_query, other=0)
    is_value = is_query[:, None] & (column < WIDTH)[None, :]
    q = _tile(q_ptr, query, head, length, q_row, q_head, q_token, is_value, PADDED)
    best = tl.full([TILE], _NOTHING, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    out = tl.zeros([TILE, PADDED], tl.float32)
    first = tl.maximum(tile * TILE - tl.load(position_ptr + tile * TILE), 0)
    for begin in range(first // STEP * STEP, tl.minimum((tile + 1) * TILE, tokens), STEP):
        key = begin + tl.arange(0, STEP)
        is_key = (key < tokens)[:, None] & (column < WIDTH)[None, :]
        k = _tile(k_ptr, key, head // GROUP, length, k_row, k_head, k_token, is_key, PADDED)
        scores = tl.dot(q, tl.trans(k)) * scale
        sees = (key[None, :] >= start[:, None]) & (key[None, :] <= query[:, None])
        scores = tl.where(sees, scores, _NOTHING)
        better = tl.maximum(best, tl.max(scores, 1))
        # A query may see none of the first keys. Then nothing is best, and nothing is added.
        base = tl.where(better == _NOTHING, 0.0, better)
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(best - base)
        total = total * kept + tl.sum(weights, 1)
        v = _tile(v_ptr, key, head // GROUP, length, v_row, v_head, v_token, is_key, PADDED)
        out = out * kept[:, None] + _if_any(tl.dot(weights.to(v.dtype), v), sees)
        best = better
    out_at = (query.to(tl.int64) * heads + head) * WIDTH
    tl.store(out_ptr + out_at[:, None] + column[None, :], out / total[:, None], mask=is_value)
    tl.store(lse_ptr + head * tokens + query, best + tl.log2(total), mask=is_query)


@triton.jit
def _backward_queries(
    q_ptr, k_ptr, v_ptr, position_ptr, out_ptr, d_out_ptr, lse_ptr, delta_ptr, dq_ptr,
    q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token,
    tokens, length, heads, scale, unit,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """The gradients of the queries, and `delta`: each output times its gradient."""
    tile, head = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, PADDED)
    query = tile * TILE + tl.arange(0, TILE)
    is_query = query < tokens
    start = query - tl.load(position_ptr + query, mask=is_query, other=0)
    is_value = is_query[:, None] & (column < WIDTH)[None, :]
    q = _tile(q_ptr, query, head, length, q_row, q_head, q_token, is_value, PADDED)
    own_at = (query.to(tl.int64) * heads + head)[:, None] * WIDTH + column[None, :]
    d_out = tl.load(d_out_ptr + own_at, mask=is_value, other=0.0)
    out = tl.load(out_ptr + own_at, mask=is_value, other=0.0)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    tl.store(delta_ptr + head * tokens + query, delta, mask=is_query)
    lse = tl.load(lse_ptr + head * tokens + query, mask=is_query, other=0.0)
    dq = tl.zeros([TILE, PADDED], tl.float32)
    first = tl.maximum(tile * TILE - tl.load(position_ptr + tile * TILE), 0)
    for begin in range(first // STEP * STEP, tl.minimum((tile + 1) * TILE, tokens), STEP):
        key = begin + tl.arange(0, STEP)
        is_key = (key < tokens)[:, None] & (column < WIDTH)[None, :]
        k = _tile(k_ptr, key, head // GROUP, length, k_row, k_head, k_token, is_key, PADDED)
        v = _tile(v_ptr, key, head // GROUP, length, v_row, v_head, v_token, is_key, PADDED)
        scores = tl.dot(q, tl.trans(k)) * scale
        sees = (key[None, :] >= start[:, None]) & (key[None, :] <= query[:, None])
        weights = tl.where(sees, tl.exp2(scores - lse[:, None]), 0.0)
        dweights = tl.dot(d_out, tl.trans(v))
        dscores = tl.where(sees, weights * (dweights - delta[:, None]), 0.0)
        dq += _if_any(tl.dot(dscores.to(k.dtype), k), sees)
    tl.store(dq_ptr + own_at, dq * unit, mask=is_value)


@triton.jit
def _backward_keys(
    q_ptr, k_ptr, v_ptr, position_ptr, left_ptr, d_out_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token,
    tokens, length, heads, scale, unit,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """The gradients of the keys and values; GROUP heads of queries share them."""
    tile, shared = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, PADDED)
    key = tile * TILE + tl.arange(0, TILE)
    is_key = (key < tokens)[:, None] & (column < WIDTH)[None, :]
    k = _tile(k_ptr, key, shared, length, k_row, k_head, k_token, is_key, PADDED)
    v = _tile(v_ptr, key, shared, length, v_row, v_head, v_token, is_key, PADDED)
    dk = tl.zeros([TILE, PADDED], tl.float32)
    dv = tl.zeros([TILE, PADDED], tl.float32)
    last = tl.minimum((tile + 1) * TILE, tokens) - 1
    end = tl.minimum(last + tl.maximum(tl.load(left_ptr + last), 0) + 1, tokens)
    for member in range(GROUP):
        head = shared * GROUP + member
        for begin in range(tile * TILE, end, STEP):
            query = begin + tl.arange(0, STEP)
            is_query = query < tokens
            start = query - tl.load(position_ptr + query, mask=is_query, other=0)
            is_value = is_query[:, None] & (column < WIDTH)[None, :]
            q = _tile(q_ptr, query, head, length, q_row, q_head, q_token, is_value, PADDED)
            own_at = (query.to(tl.int64) * heads + head)[:, None] * WIDTH + column[None, :]
            d_out = tl.load(d_out_ptr + own_at, mask=is_value, other=0.0)
            lse = tl.load(lse_ptr + head * tokens + query, mask=is_query, other=0.0)
            delta = tl.load(delta_ptr + head * tokens + query, mask=is_query, other=0.0)
            scores = tl.dot(k, tl.trans(q)) * scale
            sees = (key[:, None] >= start[None, :]) & (key[:, None] <= query[None, :])
            sees = sees & is_query[None, :]
            weights = tl.where(sees, tl.exp2(scores - lse[None, :]), 0.0)
            dv += _if_any(tl.dot(weights.to(d_out.dtype), d_out), sees)
            dweights = tl.dot(v, tl.trans(d_out))
            dscores = tl.where(sees, weights * (dweights - delta[None, :]), 0.0)
            dk += _if_any(tl.dot(dscores.to(q.dtype), q), sees)
    heads_shared = heads // GROUP
    own_at = (key.to(tl.int64) * heads_shared + shared)[:, None] * WIDTH + column[None, :]
    tl.store(dk_ptr + own_at, dk * unit, mask=is_key)
    tl.store(dv_ptr + own_at, dv, mask=is_key)


def _sizes(q: Tensor, k: Tensor) -> dict[str, Any]:
    """What all three kernels are compiled for."""
    width = q.shape[3]
    padded = max(16, triton.next_power_of_2(width))
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "WIDTH": width,
        "PADDED": padded,
        "TILE": _TILE if padded <= _WIDE else _TILE_OF_WIDE,
        "STEP": STEP,
        "num_warps": 4 if padded <= _WIDE // 2 else 8,
        "num_stages": 3,
    }


def _strides(*tensors: Tensor) -> list[int]:
    for tensor in tensors:
        assert tensor.stride(3) == 1
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def forward(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """(rows, length, heads, width) from (rows, heads, length, width), and log2 of the sums."""
    rows, heads, length, width = q.shape
    tokens, sizes = rows * length, _sizes(q, k)
    out = q.new_empty(rows, length, heads, width)
    lse = q.new_empty(heads, tokens, dtype=torch.float32)
    _forward[(triton.cdiv(tokens, sizes["TILE"]), heads)](
        q, k, v, position, out, lse, *_strides(q, k, v),
        tokens, length, heads, scale * _LOG2_E, **sizes,
    )  # fmt: skip
    return out, lse


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, position: Tensor, left: Tensor, out: Tensor,
    lse: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v, each (rows, length, heads, width)."""
    rows, heads, length, width = q.shape
    tokens, sizes = rows * length, _sizes(q, k)
    dq = q.new_empty(rows, length, heads, width)
    dk, dv = (t.new_empty(rows, length, t.shape[1], width) for t in (k, v))
    delta = torch.empty_like(lse)
    shape = (tokens, length, heads, scale * _LOG2_E, scale)
    tiles, strides = triton.cdiv(tokens, sizes["TILE"]), _strides(q, k, v)
    _backward_queries[(tiles, heads)](
        q, k, v, position, out, d_out, lse, delta, dq, *strides, *shape, **sizes
    )
    _backward_keys[(tiles, k.shape[1])](
        q, k, v, position, left, d_out, lse, delta, dk, dv, *strides, *shape, **sizes
    )
    return dq, dk, dv
