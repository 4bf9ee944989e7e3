"""CUDA kernels of pairs: all Gram norms in one launch, all scaling and its errors in another."""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from userdp.clipping import kernels
from userdp.clipping.triton_tables import Addresses, check_aligned, dtype_name, tokens_of, typed

_TILE = 128
# Columns of a tile that are read at a time.
_SLICE = 64
# Shared memory that is left for sums within a program.
_SPARE_BYTES = 4096
# What a kept Gram matrix may be off by, relative to its trace: float16 has 11 digits, and its least
# number is 2^-24 of the largest value, which is 1.
_KEPT_ERROR = 2.0**-11 + 2.0**-17
# A sixteenth of float32's last digit.
_CUT_OFF = 2.0**-27


@triton.jit
def _tiles_of(pair):
    """The tiles (i, j), j <= i, of the pair with this number."""
    i = ((tl.sqrt(8.0 * pair.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i += ((i + 1) * (i + 2) // 2 <= pair).to(tl.int32)
    i -= (i * (i + 1) // 2 > pair).to(tl.int32)
    return i, pair - i * (i + 1) // 2


@triton.jit
def _tile(place, rows, columns, length, width, EVEN: tl.constexpr):
    """Values of a matrix at these rows and columns, zero outside it; `EVEN` where none is."""
    return tl.load(place) if EVEN else tl.load(place, (rows < length) & (columns < width), 0.0)


@triton.jit
def _add_square(
    gram, base, width, i, length, TILE: tl.constexpr, SLICE: tl.constexpr, EVEN: tl.constexpr
):
    """gram += a a^T over all columns, a the tile i of one user's matrix, read once."""
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
    """gram += a b^T over all columns, a and b the tiles i and j of one user's matrix."""
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
    """A square tile with zeros beside its diagonal."""
    rows, columns = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    return tl.where(rows == columns, values, 0.0)


@triton.jit
def _gram_kernel(
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
    num_pairs,
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
    # One program: one input x with the outputs y that were computed from it, one user, and one pair
    # of token tiles; its mirror image counts too. First the side that will not be scaled, whose
    # Gram matrix of each tile with itself is kept for `_scale_kernel`. Pairs of one user run at the
    # same time, and share what they read.
    pair = tl.program_id(0)
    user = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(2)
    i, j = _tiles_of(pair)
    start, length = tokens_of(starts, user, row_length)
    sums = sums_pointer + (entry * num_users + user) * (num_pairs + 4 * num_tiles)
    own = sums + num_pairs + i
    if i * TILE >= length:
        tl.store(sums + pair, 0.0)
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
    # Tensor cores cut digits off each time that 16 columns are added.
    terms += tl.abs(terms) * columns * CUT_OFF
    tl.store(sums + pair, tl.where(i == j, terms, 2 * terms))
    if i == j:
        tl.store(own, tl.sum(_diagonal(kept, TILE)) + LEAST)
        tl.store(own + num_tiles, tl.sum(_diagonal(gram, TILE)) + LEAST)
        # `kernels.exposure` of this tile.
        tokens = _diagonal(kept * gram, TILE)
        exposed = tl.maximum(tl.sum(tokens), tl.maximum(terms, 0.0))
        exposed += FEW_TOKENS * tl.sqrt(tl.sum(tokens * tokens))
        tl.store(own + 2 * num_tiles, tl.sqrt(exposed))
        # No value of a Gram matrix is larger than the largest on its diagonal.
        largest = tl.maximum(tl.max(_diagonal(kept, TILE)), LEAST)
        tl.store(own + 3 * num_tiles, largest)
        place = entry.to(tl.int64) * all_tiles + tl.load(first_tiles + user) + i
        square = tl.arange(0, TILE)[:, None] * TILE + tl.arange(0, TILE)[None, :]
        tl.store(kept_pointer + place * TILE * TILE + square, (kept / largest).to(tl.float16))


@triton.jit
def _scale_kernel(
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
    num_pairs,
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
    # One program: the side of an entry that is scaled, one user, one tile of its tokens. Scales it
    # by the user's factor, rounding as its dtype does, and takes the norm of what the rounding
    # errors e of this tile's tokens add to the gradient: sum_st <e_s, e_t> <kept_s, kept_t>. They
    # are taken in units of EPS, a power of two: the dtype may have nothing as small.
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
        # A factor of zero silences even a value that is not finite.
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
    own = sums_pointer + (entry * num_users + user) * (num_pairs + 4 * num_tiles) + num_pairs + i
    squared = tl.sum(gram * kept) * tl.load(own + 3 * num_tiles)
    # A bound of all terms together, for the rounding of the kept side; and for that of the errors,
    # by half of EPS at most, before their products were taken.
    bound = (tl.sum(_diagonal(gram, TILE)) + LEAST) * tl.load(own)
    moved = tl.sqrt(tl.maximum(squared, 0.0) + KEPT_ERROR * bound) + 0.51 * EPS * tl.sqrt(bound)
    tl.store(distance, moved * EPS)


class GramTable:
    """Norms of gradients g_u = y_u^T x_u that are not formed, for all inputs x in one launch.

    Each entry is an input x_ULI and the outputs' gradients y_ULO computed from it; their squared
    norms add up. One side is later scaled: x where `scale_inputs` says so, else its only y.

    Where users have unlike many rows, up to `most_rows`, U counts rows, L the tokens of a row, and
    `starts` says where in the rows each of the `users` begins.
    """

    def __init__(
        self,
        entries: Sequence[tuple[Tensor, Sequence[Tensor]]],
        scale_inputs: Sequence[bool],
        *,
        users: int | None = None,
        most_rows: int = 1,
    ) -> None:
        first, _ = entries[0]
        rows, self._length, _ = first.shape
        self._users = rows if users is None else users
        self._device = first.device
        self._unit = math.gcd(_SLICE, *(t.shape[2] for x, ys in entries for t in (x, *ys)))
        self._scale_x = list(scale_inputs)
        longest = most_rows * self._length
        self._tile = max(16, min(_TILE, triton.next_power_of_2(longest)))
        self._num_tiles = triton.cdiv(longest, self._tile)
        self._num_pairs = self._num_tiles * (self._num_tiles + 1) // 2
        # Tiles of all users are at most these.
        last_tiles = self._users if self._length % self._tile else 0
        tiles = min(rows * self._length // self._tile + last_tiles, self._users * self._num_tiles)
        self._all_tiles = tiles
        each = torch.arange(self._users + 1, dtype=torch.int32, device=self._device)
        self._equal = (each, each * self._num_tiles)
        self._shape: dict[str, Any] = {
            "TILE": self._tile,
            "SLICE": _SLICE,
            "UNIT": self._unit,
            "EVEN": self._unit == _SLICE and self._length % self._tile == 0,
            "DTYPE": dtype_name(first),
            "LEAST": kernels.least_square(torch.float32),
        }
        self._entries = Addresses(3, len(entries), self._device)
        self._tensors = Addresses(2, sum(1 + len(ys) for _, ys in entries), self._device)
        self._scaled = Addresses(4, len(entries), self._device)
        # Of tiles of the side that is not scaled: Gram matrices, and what `_gram_kernel` summed.
        self._kept: tuple[Tensor, Tensor] | None = None
        self._where = self._equal
        # As measured on an H200. Of a pair of tiles two are on their way at a time, of a single one
        # one; scaled, it lies beside its slices. Few registers let two programs share a processor.
        warps = 8 if self._tile == _TILE else 4
        slice_bytes = self._tile * _SLICE * first.element_size()
        stages = (
            self._stages(7, slice_bytes)
            if self._num_tiles == 1
            else self._stages(5, 2 * slice_bytes)
        )
        self._for_gram = {"num_warps": warps, "num_stages": stages}
        stages = self._stages(6, slice_bytes) - 1
        self._for_scale = {"num_warps": warps, "num_stages": stages, "maxnreg": 128}

    def squared_norms(
        self, entries: Sequence[tuple[Tensor, Sequence[Tensor]]], starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(entries, users), from above, and their `kernels.exposure`; keeps what `scaled` needs."""
        self._where = self._equal if starts is None else (starts, self._first_tiles(starts))
        check_aligned([t for x, ys in entries for t in (x, *ys)])
        tensors: list[Tensor] = []
        places: list[tuple[int, int, int]] = []
        for (x, ys), scale_x in zip(entries, self._scale_x, strict=True):
            kept, other = (ys, [x]) if scale_x else ([x], ys)
            first = len(tensors)
            tensors += [*kept, *other]
            places.append((first, first + len(kept), len(tensors)))
        entry_rows = self._entries.send(*zip(*places, strict=True))
        tensor_rows = self._tensors.send(
            [tensor.data_ptr() for tensor in tensors],
            [tensor.shape[2] // self._unit for tensor in tensors],
        )
        pairs, tiles = self._num_pairs, self._num_tiles
        sums = self._empty(len(entries), self._users, pairs + 4 * tiles)
        squares = (len(entries), self._all_tiles, self._tile, self._tile)
        kept = self._empty(*squares, dtype=torch.float16)
        _gram_kernel[(pairs, self._users, len(entries))](
            *entry_rows,
            *tensor_rows,
            sums,
            kept,
            *self._where,
            self._length,
            self._users,
            pairs,
            tiles,
            self._all_tiles,
            ONE_TILE=tiles == 1,
            FEW_TOKENS=kernels.FEW_TOKENS,
            CUT_OFF=_CUT_OFF,
            **self._shape,
            **self._for_gram,
        )
        self._kept = (kept, sums)
        by_tile = sums[..., pairs:].unflatten(-1, (4, -1)).sum(-1)
        squares_kept, squares_other, exposure, _ = by_tile.unbind(-1)
        return kernels.raised(sums[..., :pairs].sum(-1), squares_kept * squares_other), exposure

    def scaled(
        self,
        entries: Sequence[tuple[Tensor, Sequence[Tensor]]],
        factor_rows: Sequence[int],
        factors: Tensor,
    ) -> tuple[list[Tensor], Tensor]:
        """The scaled side of every entry, and (entries, users) how far rounding moved gradients.

        Entry e's factors are `factors[factor_rows[e]]`. The distance is from above: a user's tiles
        may have moved its gradient the same way.
        """
        sides = [
            x if scale_x else ys[0] for (x, ys), scale_x in zip(entries, self._scale_x, strict=True)
        ]
        out = [torch.empty_like(side) for side in sides]
        rows = self._scaled.send(
            [side.data_ptr() for side in sides],
            [side.data_ptr() for side in out],
            [side.shape[2] // self._unit for side in sides],
            factor_rows,
        )
        assert self._kept is not None
        (kept, sums), self._kept = self._kept, None
        distances = self._empty(len(entries), self._users, self._num_tiles)
        _scale_kernel[(self._num_tiles, self._users, len(entries))](
            *rows,
            factors.contiguous(),
            distances,
            sums,
            kept,
            *self._where,
            self._length,
            self._users,
            self._num_pairs,
            self._num_tiles,
            self._all_tiles,
            EPS=torch.finfo(sides[0].dtype).eps,
            KEPT_ERROR=_KEPT_ERROR,
            **self._shape,
            **self._for_scale,
        )
        return out, distances.sum(-1)

    def _stages(self, wanted: int, stage_bytes: int) -> int:
        """Slices on their way at a time: as many as wanted, or as the device has room for."""
        if self._device.type != "cuda":
            return wanted
        device: Any = torch.cuda.get_device_properties(self._device)
        room = device.shared_memory_per_block_optin - _SPARE_BYTES
        return max(2, min(wanted, room // stage_bytes))

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _first_tiles(self, starts: Tensor) -> Tensor:
        """Where each user's tiles begin."""
        tiles = (starts.diff() * self._length + (self._tile - 1)) // self._tile
        return (tiles.cumsum(0) - tiles).to(torch.int32)
