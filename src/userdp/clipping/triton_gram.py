"""CUDA kernels of pairs: all Gram norms in one launch, before scaling and after."""

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
from userdp.clipping.triton_tables import Addresses, check_aligned, dtype_name, typed

_TILE = 128
# Columns of a tile that are read at a time.
_SLICE = 64
# Shared memory that is left for sums within a program.
_SPARE_BYTES = 4096


@triton.jit
def _tiles_of(pair):
    """The tiles (i, j), j <= i, of the pair with this number."""
    i = ((tl.sqrt(8.0 * pair.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i += ((i + 1) * (i + 2) // 2 <= pair).to(tl.int32)
    i -= (i * (i + 1) // 2 > pair).to(tl.int32)
    return i, pair - i * (i + 1) // 2


@triton.jit
def _tokens_of(starts, user, row_length):
    """A user's first token in the batch, and how many it has."""
    first = tl.load(starts + user).to(tl.int64)
    last = tl.load(starts + user + 1).to(tl.int64)
    return first * row_length, ((last - first) * row_length).to(tl.int32)


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
def _write_sums(sums, pair, i, j, kept, gram, num_pairs, num_tiles, TILE: tl.constexpr):
    """What a pair of tiles adds to the squared norm, and on the diagonal to each side's own."""
    terms = tl.sum(gram * kept)
    tl.store(sums + pair, tl.where(i == j, terms, 2 * terms))
    if i == j:
        diagonal = tl.arange(0, TILE)[:, None] == tl.arange(0, TILE)[None, :]
        tl.store(sums + num_pairs + i, tl.sum(tl.where(diagonal, kept, 0.0)))
        tl.store(sums + num_pairs + num_tiles + i, tl.sum(tl.where(diagonal, gram, 0.0)))


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
    first_pairs,
    row_length,
    num_users,
    num_pairs,
    num_tiles,
    all_pairs,
    TILE: tl.constexpr,
    SLICE: tl.constexpr,
    UNIT: tl.constexpr,
    EVEN: tl.constexpr,
    ONE_TILE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    # One program: one input x with the outputs y that were computed from it, one user, and one pair
    # of token tiles; its mirror image counts too. First the side that will not be scaled, whose
    # Gram matrix is kept for the second look. Pairs of one user run at the same time, and share
    # what they read.
    pair = tl.program_id(0)
    user = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(2)
    i, j = _tiles_of(pair)
    start, length = _tokens_of(starts, user, row_length)
    if i * TILE >= length:
        return
    sums = sums_pointer + (entry * num_users + user) * (num_pairs + 2 * num_tiles)
    square = tl.arange(0, TILE)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    place = entry.to(tl.int64) * all_pairs + tl.load(first_pairs + user) + pair
    middle = tl.load(first_other + entry)

    kept = tl.zeros((TILE, TILE), tl.float32)
    for k in range(tl.load(first_kept + entry), middle):
        width = tl.load(widths + k).to(tl.int32) * UNIT
        values = typed(tl.load(addresses + k), DTYPE) + start * width
        kept = _add_gram(kept, values, width, i, j, length, TILE, SLICE, EVEN, ONE_TILE)
    gram = tl.zeros((TILE, TILE), tl.float32)
    for k in range(middle, tl.load(after_other + entry)):
        width = tl.load(widths + k).to(tl.int32) * UNIT
        values = typed(tl.load(addresses + k), DTYPE) + start * width
        gram = _add_gram(gram, values, width, i, j, length, TILE, SLICE, EVEN, ONE_TILE)
    _write_sums(sums, pair, i, j, kept, gram, num_pairs, num_tiles, TILE)
    tl.store(kept_pointer + place * TILE * TILE + square, kept)


@triton.jit
def _scale_kernel(
    in_addresses,
    out_addresses,
    widths,
    factor_rows,
    factors_pointer,
    sums_pointer,
    kept_pointer,
    starts,
    first_pairs,
    row_length,
    num_users,
    num_pairs,
    num_tiles,
    all_pairs,
    TILE: tl.constexpr,
    SLICE: tl.constexpr,
    UNIT: tl.constexpr,
    EVEN: tl.constexpr,
    ONE_TILE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    # The norm of a pair with one side scaled by the users' factors, rounding as its dtype does:
    # that of exactly the values that will be summed. Where a user is one tile, the scaling happens
    # here; elsewhere every value would be scaled again for each pair of tiles: it comes scaled.
    pair = tl.program_id(0)
    user = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(2)
    i, j = _tiles_of(pair)
    start, length = _tokens_of(starts, user, row_length)
    if i * TILE >= length:
        return
    width = tl.load(widths + entry).to(tl.int32) * UNIT
    out = typed(tl.load(out_addresses + entry), DTYPE) + start * width
    gram = tl.zeros((TILE, TILE), tl.float32)
    if ONE_TILE:
        factor = tl.load(factors_pointer + tl.load(factor_rows + entry) * num_users + user)
        values = typed(tl.load(in_addresses + entry), DTYPE) + start * width
        rows = tl.arange(0, TILE)[:, None]
        for first in range(0, width, SLICE):
            column = first + tl.arange(0, SLICE)[None, :]
            place = rows * width + column
            inside = (rows < length) & (column < width)
            value = tl.load(values + place, inside, 0.0)
            # A factor of zero silences even a value that is not finite.
            wide = tl.where(factor == 0.0, 0.0, value.to(tl.float32) * factor)
            a = wide.to(value.dtype)
            tl.store(out + place, a, inside)
            gram = tl.dot(a, tl.trans(a), gram)
    else:
        gram = _add_gram(gram, out, width, i, j, length, TILE, SLICE, EVEN, ONE_TILE)
    square = tl.arange(0, TILE)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    place = entry.to(tl.int64) * all_pairs + tl.load(first_pairs + user) + pair
    kept = tl.load(kept_pointer + place * TILE * TILE + square)
    sums = sums_pointer + (entry * num_users + user) * (num_pairs + 2 * num_tiles)
    _write_sums(sums, pair, i, j, kept, gram, num_pairs, num_tiles, TILE)


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
        self._dtype = dtype_name(first)
        self._device = first.device
        self._unit = math.gcd(_SLICE, *(t.shape[2] for x, ys in entries for t in (x, *ys)))
        self._scale_x = list(scale_inputs)
        longest = most_rows * self._length
        self._tile = max(16, min(_TILE, triton.next_power_of_2(longest)))
        self._num_tiles = triton.cdiv(longest, self._tile)
        self._num_pairs = self._num_tiles * (self._num_tiles + 1) // 2
        # Tiles of all users are at most these, a tile in at most (tiles + 1) / 2 pairs on average.
        last_tiles = self._users if self._length % self._tile else 0
        tiles = min(rows * self._length // self._tile + last_tiles, self._users * self._num_tiles)
        self._all_pairs = tiles * (self._num_tiles + 1) // 2
        each = torch.arange(self._users + 1, dtype=torch.int32, device=self._device)
        self._equal = (each, each * self._num_pairs)
        self._entries = Addresses(3, len(entries), self._device)
        self._tensors = Addresses(2, sum(1 + len(ys) for _, ys in entries), self._device)
        self._scaled = Addresses(4, len(entries), self._device)
        self._kept: Tensor | None = None
        self._where = self._equal
        # As measured on an H200. Of a pair of tiles two are on their way at a time, of a single one
        # one; scaled, it lies beside its slices. Few registers let two programs share a processor.
        warps = 8 if self._tile == _TILE else 4
        slice_bytes = self._tile * _SLICE * first.element_size()
        if self._num_tiles == 1:
            self._for_gram = {"num_warps": warps, "num_stages": self._stages(7, slice_bytes)}
            stages = self._stages(6, slice_bytes) - 1
            self._for_scale = {"num_warps": warps, "num_stages": stages, "maxnreg": 128}
        else:
            self._for_gram = {"num_warps": warps, "num_stages": self._stages(5, 2 * slice_bytes)}
            self._for_scale = {"num_warps": 4, "num_stages": self._stages(3, 2 * slice_bytes)}

    def squared_norms(
        self, entries: Sequence[tuple[Tensor, Sequence[Tensor]]], starts: Tensor | None = None
    ) -> Tensor:
        """(entries, users), from above; keeps what `scaled` needs."""
        self._where = self._equal if starts is None else (starts, self._first_pairs(starts))
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
        self._kept = self._empty(len(entries), self._all_pairs, self._tile, self._tile)
        sums = self._launch(
            _gram_kernel, len(entries), *entry_rows, *tensor_rows, options=self._for_gram
        )
        return self._norms(sums)

    def scaled(
        self,
        entries: Sequence[tuple[Tensor, Sequence[Tensor]]],
        factor_rows: Sequence[int],
        factors: Tensor,
        spread: Tensor | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        """The scaled side of every entry, and the squared norms (entries, users) of what it gives.

        Entry e's factors are `factors[factor_rows[e]]`; `spread` are those of rows.
        """
        sides = [
            x if scale_x else ys[0] for (x, ys), scale_x in zip(entries, self._scale_x, strict=True)
        ]
        if self._num_tiles == 1:
            out = [torch.empty_like(side) for side in sides]
        else:
            by_row = factors if spread is None else spread
            out = [
                kernels.run(kernels.scaled, side, by_row[row])
                for side, row in zip(sides, factor_rows, strict=True)
            ]
        rows = self._scaled.send(
            [side.data_ptr() for side in sides],
            [side.data_ptr() for side in out],
            [side.shape[2] // self._unit for side in sides],
            factor_rows,
        )
        sums = self._launch(
            _scale_kernel, len(entries), *rows, factors.contiguous(), options=self._for_scale
        )
        self._kept = None
        return out, self._norms(sums)

    def _stages(self, wanted: int, stage_bytes: int) -> int:
        """Slices on their way at a time: as many as wanted, or as the device has room for."""
        if self._device.type != "cuda":
            return wanted
        device: Any = torch.cuda.get_device_properties(self._device)
        room = device.shared_memory_per_block_optin - _SPARE_BYTES
        return max(2, min(wanted, room // stage_bytes))

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self._device)

    def _first_pairs(self, starts: Tensor) -> Tensor:
        """Where each user's pairs of tiles begin."""
        tiles = (starts.diff() * self._length + (self._tile - 1)) // self._tile
        pairs = tiles * (tiles + 1) // 2
        return (pairs.cumsum(0) - pairs).to(torch.int32)

    def _launch(
        self, kernel: Any, entries: int, *arguments: Tensor, options: dict[str, int]
    ) -> Tensor:
        # Zeros: users have unlike many tiles.
        sums = self._empty(entries, self._users, self._num_pairs + 2 * self._num_tiles).zero_()
        kernel[(self._num_pairs, self._users, entries)](
            *arguments,
            sums,
            self._kept,
            *self._where,
            self._length,
            self._users,
            self._num_pairs,
            self._num_tiles,
            self._all_pairs,
            TILE=self._tile,
            SLICE=_SLICE,
            UNIT=self._unit,
            EVEN=self._unit == _SLICE and self._length % self._tile == 0,
            ONE_TILE=self._num_tiles == 1,
            DTYPE=self._dtype,
            **options,
        )
        return sums

    def _norms(self, sums: Tensor) -> Tensor:
        pairs = self._num_pairs
        squares_x, squares_y = sums[..., pairs:].unflatten(-1, (2, -1)).sum(-1).unbind(-1)
        return kernels.raised(sums[..., :pairs].sum(-1), squares_x * squares_y)
