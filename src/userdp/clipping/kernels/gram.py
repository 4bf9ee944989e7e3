"""CUDA kernels for pairs: all Gram norms in one launch, all scaling and its errors in another."""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from userdp.clipping.kernels import reference
from userdp.clipping.kernels.gram_kernels import gram_kernel, scale_kernel
from userdp.clipping.kernels.tables import Addresses, check_aligned, dtype_name

_TILE = 128
# Columns of a tile that are read at a time.
_SLICE = 64
# Shared memory that is left for sums within a program.
_SPARE_BYTES = 4096
# How far a kept Gram matrix may be off, relative to its trace: float16 has 11 digits, and its
# smallest number is 2^-24 of the largest value, which is 1.
_KEPT_ERROR = 2.0**-11 + 2.0**-17
# A sixteenth of float32's last digit.
_CUT_OFF = 2.0**-27


class GramTable:
    """Norms of gradients g_u = y_u^T x_u without forming them, for all inputs x in one launch.

    Each entry is an input x_ULI with the gradients y_ULO of all outputs computed from it; their
    squared norms add up. One side is scaled later: x where `scale_inputs` says so, else the only y.

    In a ragged batch U counts rows and L the tokens of one row. There are `users` users with at
    most `most_rows` rows each, and `starts` says where each user's rows begin.
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
        self._num_tile_pairs = self._num_tiles * (self._num_tiles + 1) // 2
        # The most tiles that all users together can have.
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
            "LEAST": reference.least_square(torch.float32),
        }
        self._entries = Addresses(3, len(entries), self._device)
        self._tensors = Addresses(2, sum(1 + len(ys) for _, ys in entries), self._device)
        self._scaled = Addresses(4, len(entries), self._device)
        # From `squared_norms` to `scaled`: Gram matrices of the side that is not scaled, and sums.
        self._kept: tuple[Tensor, Tensor] | None = None
        self._where = self._equal
        # Tuned on an H200. A stage holds one slice of one tile, or of two where tiles meet in
        # pairs. `scale_kernel` needs the room of one more slice for a kept Gram matrix. With few
        # registers two programs share a multiprocessor.
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
        """Squared norms (entries, users) from above, and `reference.exposure` of each.

        Keeps what `scaled` needs.
        """
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
        pairs, tiles = self._num_tile_pairs, self._num_tiles
        sums = self._empty(len(entries), self._users, pairs + 4 * tiles)
        squares = (len(entries), self._all_tiles, self._tile, self._tile)
        kept = self._empty(*squares, dtype=torch.float16)
        gram_kernel[(pairs, self._users, len(entries))](
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
            FEW_TOKENS=reference.FEW_TOKENS,
            CUT_OFF=_CUT_OFF,
            **self._shape,
            **self._for_gram,
        )
        self._kept = (kept, sums)
        by_tile = sums[..., pairs:].unflatten(-1, (4, -1)).sum(-1)
        squares_kept, squares_other, exposure, _ = by_tile.unbind(-1)
        return reference.raised(sums[..., :pairs].sum(-1), squares_kept * squares_other), exposure

    def scaled(
        self,
        entries: Sequence[tuple[Tensor, Sequence[Tensor]]],
        factor_rows: Sequence[int],
        factors: Tensor,
    ) -> tuple[list[Tensor], Tensor]:
        """The scaled sides, and how far rounding moved each gradient (entries, users).

        Entry e's factors are `factors[factor_rows[e]]`. The distance is from above: the distances
        of a user's tiles are added, since all tiles may have moved its gradient the same way.
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
        scale_kernel[(self._num_tiles, self._users, len(entries))](
            *rows,
            factors.contiguous(),
            distances,
            sums,
            kept,
            *self._where,
            self._length,
            self._users,
            self._num_tile_pairs,
            self._num_tiles,
            self._all_tiles,
            EPS=torch.finfo(sides[0].dtype).eps,
            KEPT_ERROR=_KEPT_ERROR,
            **self._shape,
            **self._for_scale,
        )
        return out, distances.sum(-1)

    def _stages(self, wanted: int, stage_bytes: int) -> int:
        """How many stages are loaded ahead: as many as wanted, or as shared memory has room for."""
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
