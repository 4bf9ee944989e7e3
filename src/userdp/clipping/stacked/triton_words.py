"""The embedding tables of stacked LSTMs on CUDA: launches of `kernels.word_table` and `word_rows`.

`stacked.words` is the reference, in torch.

Shapes: U users, N positions, V words, D width. Everything is secret until noise is added.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from userdp.clipping.kernels import word_rows, word_table

# Programs that share the table of a user in the second pass.
_SPLITS = 4


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How much of the logits a program computes at once, and by how many warps."""

    positions: int
    words: int
    warps: int
    stages: int


# By precision, the fastest of those measured on an H200 on 2026-11-18.
ATTENTION = {
    "tf32": Tiles(positions=128, words=128, warps=8, stages=1),
    "tf32x3": Tiles(positions=128, words=32, warps=8, stages=2),
}
STEP = {
    "tf32": Tiles(positions=64, words=64, warps=4, stages=1),
    "tf32x3": Tiles(positions=16, words=64, warps=4, stages=1),
}


def _precision() -> str:
    """How torch takes products of float32: three products in TF32 are one in float32."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def _constants(tiles: Tiles, width: int, smallest: float) -> dict[str, Any]:
    """A product needs powers of two, 16 at least: 96 dimensions are 64 and 32."""
    left = max(16, 1 << (width.bit_length() - 1))
    right = max(16, triton.next_power_of_2(width - left)) if width > left else 0
    return {
        "WIDTH": width,
        "LEFT": left,
        "RIGHT": right,
        "WORDS": tiles.words,
        "SMALLEST": smallest,
        "PRECISION": _precision(),
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


def _blocks(tiles: Tiles, positions: int) -> dict[str, Any]:
    """Positions are read in two blocks of powers of two, 80 as 64 and 16, and the rest in turns."""
    first = min(tiles.positions, max(16, 1 << (positions.bit_length() - 1)))
    left = min(positions - first, first)
    second = max(16, triton.next_power_of_2(left)) if left > 0 else 0
    return {"FIRST": first, "SECOND": second, "MORE": first + second < positions}


class TritonWords:
    """The users' tables, as `stacked.words.TorchWords`."""

    def __init__(self, theta_UVD: Tensor, start_VD: Tensor, smallest: float) -> None:
        self._theta, self._start = theta_UVD, start_VD.contiguous()
        self._smallest = smallest

    def begin(self, users: slice, factor_U: Tensor) -> None:
        """A local step of these users begins."""
        self._table, self._factor_U = self._theta[users], factor_U.contiguous()

    def rows_into(self, rows_UND: Tensor, ids_UN: Tensor) -> None:
        """Write the words w of these ids."""
        word_rows.rows_into(
            rows_UND, self._table, self._start, self._factor_U, ids_UN, self._smallest
        )

    def output_gradient(self, out_UND: Tensor, labels_UN: Tensor, weights_UN: Tensor) -> Tensor:
        """The gradient of the outputs o; a position of weight zero may have any valid label."""
        self._out, self._labels = out_UND.contiguous(), labels_UN.contiguous()
        self._weights = weights_UN.contiguous()
        users, positions, width = self._out.shape
        gradient = torch.empty_like(self._out)
        self._log_sums = gradient.new_empty((users, positions))
        tiles = ATTENTION[_precision()]
        fewest = max(16, triton.next_power_of_2(positions))
        block = min(tiles.positions, fewest)
        word_table.attention_kernel[(-(-positions // block), users)](
            self._table,
            self._start,
            self._factor_U,
            self._out,
            self._labels,
            self._weights,
            gradient,
            self._log_sums,
            self._table.shape[1],
            positions,
            POSITIONS=block,
            **_constants(tiles, width, self._smallest),
        )
        return gradient

    def step(
        self, ids_UN: Tensor, inputs_UND: Tensor, gradient_UND: Tensor, eta: float, penalty: float
    ) -> Tensor:
        """theta - eta grad, in place; returns the squared way from the beginning, (U,)."""
        del inputs_UND
        slots, sums, alongs = word_rows.pulls(
            self._table,
            self._start,
            self._factor_U,
            torch.cat((ids_UN, self._labels), 1),
            gradient_UND.contiguous(),
            self._out,
            self._weights,
            self._smallest,
        )
        users, positions, width = self._out.shape
        num_words = self._table.shape[1]
        tiles = STEP[_precision()]
        a_program = -(-num_words // (_SPLITS * tiles.words)) * tiles.words
        squared = torch.zeros((users, _SPLITS), dtype=torch.float64, device=self._out.device)
        word_table.step_kernel[(_SPLITS, users)](
            self._table,
            self._start,
            self._factor_U,
            self._out,
            self._log_sums,
            slots,
            sums,
            alongs,
            squared,
            eta,
            penalty,
            num_words,
            positions,
            2 * positions,
            a_program,
            **_blocks(tiles, positions),
            **_constants(tiles, width, self._smallest),
        )
        return squared.sum(1)
