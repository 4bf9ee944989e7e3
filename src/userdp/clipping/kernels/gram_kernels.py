"""The Triton code of `gram`: norms of pairs from Gram matrices, and scaling with its errors.

Why a norm is stored from above and what is measured of the rounding: docs/clipping.md, "Rounding".
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from userdp.clipping.kernels.tables import tokens_of, typed


@triton.jit
def _tiles_of(tile_pair):
    """The tiles (i, j), j <= i, of the tile pair with this number."""
    i = ((tl.sqrt(8.0 * tile_pair.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i += ((i + 1) * (i + 2) // 2 <= tile_pair).to(tl.int32)
    i -= (i * (i + 1) // 2 > tile_pair).to(tl.int32)
    return i, tile_pair - i * (i + 1) // 2


@triton.jit
def _tile(place, rows, columns, length, width, EVEN: tl.constexpr):
    """Values of a matrix at these rows and columns, zero outside; `EVEN` if none is outside."""
    return tl.load(place) if EVEN else tl.load(place, (rows < length) & (columns < width), 0.0)


@triton.jit
def _add_square(
    gram, base, width, i, length, TILE: tl.constexpr, SLICE: tl.constexpr, EVEN: tl.constexpr
):
    """gram += a a^T over all columns; a is tile i of one user's matrix and is read once."""
    columns = tl.arange(0, SLICE)[None, :]
    rows = (i * TILE + tl.arange(0, TILE))[:, None]
    place = base + rows * width + columns
    for start in range(0, width, SLICE):
        a = _tile(place, rows, start + columns, length, width, EVEN)
        gram = tl.dot(a, tl.trans(a), gram)
        place += SLICE
    return gram


@triton.jit
def _add_gram(
    gram,
    base,
    width,
    i,
    j,
    length,
    TILE: tl.constexpr,
    SLICE: tl.constexpr,
    EVEN: tl.constexpr,
    ONE_TILE: tl.constexpr,
):
    """gram += a b^T over all columns; a and b are tiles i and j of one user's matrix."""
    if ONE_TILE or i == j:
        gram = _add_square(gram, base, width, i, length, TILE, SLICE, EVEN)
    else:
        columns = tl.arange(0, SLICE)[None, :]
        rows_a = (i * TILE + tl.arange(0, TILE))[:, None]
        rows_b = (j * TILE + tl.arange(0, TILE))[:, None]
        a_place = base + rows_a * width + columns
        b_place = base + rows_b * width + columns
        for start in range(0, width, SLICE):
            a = _tile(a_place, rows_a, start + columns, length, width, EVEN)
            b = _tile(b_place, rows_b, start + columns, length, width, EVEN)
            gram = tl.dot(a, tl.trans(b), gram)
            a_place += SLICE
            b_place += SLICE
    return gram


@triton.jit
def _diagonal(values, TILE: tl.constexpr):
    """A square tile with zeros off its diagonal."""
    rows, columns = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    return tl.where(rows == columns, values, 0.0)


@triton.jit
def gram_kernel(
    first_kept,
    first_other,
    after_other,
    addresses,
    widths,
    sums_pointer,
    kept_pointer,
    starts,
    first_tiles,
    row_length,
    num_users,
    num_tile_pairs,
    num_tiles,
    all_tiles,
    TILE: tl.constexpr,
    SLICE: tl.constexpr,
    UNIT: tl.constexpr,
    EVEN: tl.constexpr,
    ONE_TILE: tl.constexpr,
    DTYPE: tl.constexpr,
    LEAST: tl.constexpr,
    FEW_TOKENS: tl.constexpr,
    CUT_OFF: tl.constexpr,
):
    """One program: one input x with all outputs y computed from it, one user, one pair of tiles.

    The tile pair (j, i) gives the same terms as (i, j), which count twice. A program begins with
    the side that will not be scaled: the Gram matrix of each of its tiles with itself is kept for
    `scale_kernel`. Tile pairs of one user run at the same time and share what they read.
    """
    tile_pair = tl.program_id(0)
    user = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(2)
    i, j = _tiles_of(tile_pair)
    start, length = tokens_of(starts, user, row_length)
    sums = sums_pointer + (entry * num_users + user) * (num_tile_pairs + 4 * num_tiles)
    own = sums + num_tile_pairs + i
    if i * TILE >= length:
        tl.store(sums + tile_pair, 0.0)
        if i == j:
            for plane in range(4):
                tl.store(own + plane * num_tiles, 0.0)
        return
    middle = tl.load(first_other + entry)

    columns = 0
    kept = tl.zeros((TILE, TILE), tl.float32)
    for k in range(tl.load(first_kept + entry), middle):
        width = tl.load(widths + k).to(tl.int32) * UNIT
        columns += width
        values = typed(tl.load(addresses + k), DTYPE) + start * width
        kept = _add_gram(kept, values, width, i, j, length, TILE, SLICE, EVEN, ONE_TILE)
    gram = tl.zeros((TILE, TILE), tl.float32)
    for k in range(middle, tl.load(after_other + entry)):
        width = tl.load(widths + k).to(tl.int32) * UNIT
        columns += width
        values = typed(tl.load(addresses + k), DTYPE) + start * width
        gram = _add_gram(gram, values, width, i, j, length, TILE, SLICE, EVEN, ONE_TILE)
    terms = tl.sum(gram * kept)
    # Tensor cores cut digits off whenever 16 columns are added.
    terms += tl.abs(terms) * columns * CUT_OFF
    tl.store(sums + tile_pair, tl.where(i == j, terms, 2 * terms))
    if i == j:
        tl.store(own, tl.sum(_diagonal(kept, TILE)) + LEAST)
        tl.store(own + num_tiles, tl.sum(_diagonal(gram, TILE)) + LEAST)
        # `reference.exposure` of this tile.
        tokens = _diagonal(kept * gram, TILE)
        exposed = tl.maximum(tl.sum(tokens), tl.maximum(terms, 0.0))
        exposed += FEW_TOKENS * tl.sqrt(tl.sum(tokens * tokens))
        tl.store(own + 2 * num_tiles, tl.sqrt(exposed))
        # The largest value of a Gram matrix is on its diagonal.
        largest = tl.maximum(tl.max(_diagonal(kept, TILE)), LEAST)
        tl.store(own + 3 * num_tiles, largest)
        place = entry.to(tl.int64) * all_tiles + tl.load(first_tiles + user) + i
        square = tl.arange(0, TILE)[:, None] * TILE + tl.arange(0, TILE)[None, :]
        tl.store(kept_pointer + place * TILE * TILE + square, (kept / largest).to(tl.float16))


@triton.jit
def scale_kernel(
    in_addresses,
    out_addresses,
    widths,
    factor_rows,
    factors_pointer,
    out_pointer,
    sums_pointer,
    kept_pointer,
    starts,
    first_tiles,
    row_length,
    num_users,
    num_tile_pairs,
    num_tiles,
    all_tiles,
    TILE: tl.constexpr,
    SLICE: tl.constexpr,
    UNIT: tl.constexpr,
    EVEN: tl.constexpr,
    DTYPE: tl.constexpr,
    EPS: tl.constexpr,
    KEPT_ERROR: tl.constexpr,
    LEAST: tl.constexpr,
):
    """One program: the side of an entry that is scaled, one user, one tile of its tokens.

    It scales the values by the user's factor and rounds them to their dtype. Then it takes the norm
    of what the rounding errors e of this tile add to the gradient: sum_st <e_s, e_t> <kept_s,
    kept_t>. Errors are counted in units of EPS, a power of two, because the dtype may not have
    numbers as small.
    """
    i = tl.program_id(0)
    user = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(2)
    start, length = tokens_of(starts, user, row_length)
    distance = out_pointer + (entry * num_users + user) * num_tiles + i
    if i * TILE >= length:
        tl.store(distance, 0.0)
        return
    width = tl.load(widths + entry).to(tl.int32) * UNIT
    factor = tl.load(factors_pointer + tl.load(factor_rows + entry) * num_users + user)
    values = typed(tl.load(in_addresses + entry), DTYPE) + start * width
    out = typed(tl.load(out_addresses + entry), DTYPE) + start * width
    rows = (i * TILE + tl.arange(0, TILE))[:, None]
    gram = tl.zeros((TILE, TILE), tl.float32)
    for first in range(0, width, SLICE):
        columns = first + tl.arange(0, SLICE)[None, :]
        place = rows * width + columns
        value = _tile(values + place, rows, columns, length, width, EVEN)
        # With a factor of zero even a value that is not finite becomes zero.
        wide = tl.where(factor == 0.0, 0.0, value.to(tl.float32) * factor)
        rounded = wide.to(value.dtype)
        if EVEN:
            tl.store(out + place, rounded)
        else:
            tl.store(out + place, rounded, (rows < length) & (columns < width))
        error = ((rounded.to(tl.float32) - wide) / EPS).to(value.dtype)
        gram = tl.dot(error, tl.trans(error), gram)
    square = tl.arange(0, TILE)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    place = entry.to(tl.int64) * all_tiles + tl.load(first_tiles + user) + i
    kept = tl.load(kept_pointer + place * TILE * TILE + square).to(tl.float32)
    sums = sums_pointer + (entry * num_users + user) * (num_tile_pairs + 4 * num_tiles)
    own = sums + num_tile_pairs + i
    squared = tl.sum(gram * kept) * tl.load(own + 3 * num_tiles)
    # `bound` bounds the sizes of all terms together. It pays for two roundings: of the kept Gram
    # matrix, and of the errors themselves (by at most half of EPS) before they were multiplied.
    bound = (tl.sum(_diagonal(gram, TILE)) + LEAST) * tl.load(own)
    moved = tl.sqrt(tl.maximum(squared, 0.0) + KEPT_ERROR * bound) + 0.51 * EPS * tl.sqrt(bound)
    tl.store(distance, moved * EPS)
