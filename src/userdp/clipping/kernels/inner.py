"""The CUDA kernel of tied weights: <e_u, h_u> of an embedding and the head that shares its weight.

e_u has a row e_t for each token t of user u; h_u = y_u^T x_u is a pair that is not formed. Their
inner product is the sum over all tokens s and t of the user of y[s, token_t] <x_s, e_t>.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from userdp.clipping.kernels import reference
from userdp.clipping.kernels.tables import check_aligned, tokens_of

_TILE = 128
_SLICE = 64
# The relative error of a product with a float32 number that is split into two bfloat16 numbers.
HALVES_ERROR = 2.0**-15


@triton.jit
def _inner_kernel(
    ids,
    gradients,
    inputs,
    output_gradients,
    sums_pointer,
    starts,
    row_length,
    num_tiles,
    width,
    vocabulary,
    TILE: tl.constexpr,
    SLICE: tl.constexpr,
    HALVES: tl.constexpr,
    ERROR: tl.constexpr,
):
    # One program handles one user, a tile of the head's tokens s and one of the embedding's t.
    pair = tl.program_id(0)
    user = tl.program_id(1).to(tl.int64)
    i, j = pair // num_tiles, pair % num_tiles
    first, length = tokens_of(starts, user, row_length)
    sums = sums_pointer + user * num_tiles * num_tiles + pair
    if (i * TILE >= length) | (j * TILE >= length):
        tl.store(sums, 0.0)
        return
    s, t = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, SLICE)[None, :]
    x_place = inputs + (first + s)[:, None] * width + columns
    e_place = gradients + (first + t)[:, None] * width + columns
    products = tl.zeros((TILE, TILE), tl.float32)
    x_squares = tl.zeros((TILE,), tl.float32)
    e_squares = tl.zeros((TILE,), tl.float32)
    for start in range(0, width, SLICE):
        inside = start + columns < width
        x = tl.load(x_place, (s < length)[:, None] & inside, 0.0)
        e = tl.load(e_place, (t < length)[:, None] & inside, 0.0).to(tl.float32)
        wide = x.to(tl.float32)
        x_squares += tl.sum(wide * wide, 1)
        e_squares += tl.sum(e * e, 1)
        if HALVES:
            # The second half holds what the first leaves out: together they have 16 bits.
            half = e.to(x.dtype)
            rest = (e - half.to(tl.float32)).to(x.dtype)
            products = tl.dot(x, tl.trans(half), products)
            products = tl.dot(x, tl.trans(rest), products)
        else:
            products = tl.dot(wide, tl.trans(e), products, input_precision="ieee")
        x_place += SLICE
        e_place += SLICE
    tokens = tl.load(ids + first + t, t < length, 0)
    place = output_gradients + (first + s)[:, None] * vocabulary + tokens[None, :]
    both = (s < length)[:, None] & (t < length)[None, :]
    picked = tl.load(place, both, 0.0).to(tl.float32)
    sizes = tl.abs(picked) * tl.sqrt(x_squares)[:, None] * tl.sqrt(e_squares)[None, :]
    tl.store(sums, tl.sum(picked * products + ERROR * sizes))


def inner_with_pair(
    ids_UL: Tensor,
    gradients_ULD: Tensor,
    inputs_ULD: Tensor,
    output_gradients_ULV: Tensor,
    starts: Tensor | None = None,
    *,
    most_rows: int = 1,
    halves: bool | None = None,
) -> Tensor:
    """<e_u, h_u> of every user, from above; `starts` and `most_rows` as in `GramTable`.

    `halves` splits embedding gradients into two bfloat16 numbers, by default if inputs are
    bfloat16; the range of float16 is too small for that.
    """
    check_aligned([ids_UL, gradients_ULD, inputs_ULD, output_gradients_ULV])
    units, length, width = inputs_ULD.shape
    if starts is None:
        starts = torch.arange(units + 1, dtype=torch.int32, device=ids_UL.device)
    users, longest = len(starts) - 1, most_rows * length
    tile = max(16, min(_TILE, triton.next_power_of_2(longest)))
    tiles = triton.cdiv(longest, tile)
    if halves is None:
        halves = inputs_ULD.dtype == torch.bfloat16
    wide = reference.GRAM_ROUNDINGS * torch.finfo(torch.float32).eps
    sums = torch.empty(users, tiles * tiles, dtype=torch.float32, device=ids_UL.device)
    _inner_kernel[(tiles * tiles, users)](
        ids_UL,
        gradients_ULD,
        inputs_ULD,
        output_gradients_ULV,
        sums,
        starts,
        length,
        tiles,
        width,
        output_gradients_ULV.shape[2],
        TILE=tile,
        SLICE=_SLICE,
        HALVES=halves,
        ERROR=HALVES_ERROR if halves else wide,
        num_warps=8 if tile == _TILE else 4,
        num_stages=2,
    )
    return sums.sum(1)
