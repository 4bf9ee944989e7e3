"""CUDA kernels for the embedding tables of stacked LSTMs: `stacked.words` is the reference.

The comparison of outputs with all words is attention: the outputs o_t ask, the words w_v are keys
and values. So one pass over a user's table gives every softmax and the outputs' gradient, and the
logits are never written down. A second pass computes them again, moves the table and adds up the
squared way from the beginning, in float64. Both passes read theta^0 + factor (theta - theta^0): the
clipping of the local step before costs no pass of its own.

A program works for one user alone and writes to that user's places only. Nothing is added in an
order that could change, so sums are the same every time.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs that share the table of a user in the second pass.
_SPLITS = 4


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How much of the logits a program computes at once, and by how many warps."""

    positions: int
    words: int
    warps: int
    stages: int


# The fastest of those measured on an H200.
ATTENTION = Tiles(positions=128, words=64, warps=8, stages=1)
STEP = Tiles(positions=16, words=128, warps=8, stages=1)


def _constants(tiles: Tiles, positions: int, width: int, smallest: float) -> dict[str, Any]:
    """A product needs powers of two, 16 at least: 96 dimensions are 64 and 32."""
    left = max(16, 1 << (width.bit_length() - 1))
    right = max(16, triton.next_power_of_2(width - left)) if width > left else 0
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return {
        "WIDTH": width,
        "LEFT": left,
        "RIGHT": right,
        "POSITIONS": min(tiles.positions, max(16, triton.next_power_of_2(positions))),
        "WORDS": tiles.words,
        "SMALLEST": smallest,
        # Three products in TF32 are one in float32.
        "PRECISION": "tf32" if tf32 else "tf32x3",
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


@triton.jit
def _settled(theta, start, factor, offsets, inside, POLICY: tl.constexpr):
    before = tl.load(start + offsets, inside, 0.0, eviction_policy="evict_last")
    now = tl.load(theta + offsets, inside, 0.0, eviction_policy=POLICY)
    # What is not finite has the factor zero, and must not be multiplied by it.
    return before + tl.where(factor > 0, factor * (now - before), 0.0), before


@triton.jit
def _attention_kernel(
    theta,
    start,
    factors,
    outputs,
    means,
    log_sums,
    num_words,
    num_positions,
    WIDTH: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    POSITIONS: tl.constexpr,
    WORDS: tl.constexpr,
    SMALLEST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    user = tl.program_id(1).to(tl.int64)
    factor = tl.load(factors + user)
    theta += user * num_words * WIDTH
    positions = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    has_position = positions < num_positions
    rows = (user * num_positions + positions[:, None]) * WIDTH
    left = tl.arange(0, LEFT)
    has_left = left < WIDTH
    out_left = tl.load(
        outputs + rows + left[None, :], has_position[:, None] & has_left[None, :], 0.0
    )
    mean_left = tl.zeros((POSITIONS, LEFT), tl.float32)
    if RIGHT:
        right = LEFT + tl.arange(0, RIGHT)
        has_right = right < WIDTH
        out_right = tl.load(
            outputs + rows + right[None, :], has_position[:, None] & has_right[None, :], 0.0
        )
        mean_right = tl.zeros((POSITIONS, RIGHT), tl.float32)
    largest = tl.full((POSITIONS,), float("-inf"), tl.float32)
    total = tl.zeros((POSITIONS,), tl.float32)
    for first in range(0, num_words, WORDS):
        words = first + tl.arange(0, WORDS)
        exists = words < num_words
        places = words[:, None] * WIDTH
        table_left, _ = _settled(
            theta, start, factor, places + left[None, :], exists[:, None] & has_left[None, :], ""
        )
        squares = tl.sum(table_left * table_left, 1)
        if RIGHT:
            table_right, _ = _settled(
                theta,
                start,
                factor,
                places + right[None, :],
                exists[:, None] & has_right[None, :],
                "",
            )
            squares += tl.sum(table_right * table_right, 1)
        inverse = 1.0 / tl.maximum(tl.sqrt(squares), SMALLEST)
        logits = tl.dot(out_left, tl.trans(table_left), input_precision=PRECISION)
        if RIGHT:
            logits = tl.dot(out_right, tl.trans(table_right), logits, input_precision=PRECISION)
        logits = tl.where(exists[None, :], logits * inverse[None, :], float("-inf"))
        larger = tl.maximum(largest, tl.max(logits, 1))
        shrink = tl.exp(largest - larger)
        shares = tl.exp(logits - larger[:, None])
        total = total * shrink + tl.sum(shares, 1)
        shares *= inverse[None, :]
        mean_left = tl.dot(
            shares, table_left, mean_left * shrink[:, None], input_precision=PRECISION
        )
        if RIGHT:
            mean_right = tl.dot(
                shares, table_right, mean_right * shrink[:, None], input_precision=PRECISION
            )
        largest = larger
    tl.store(
        means + rows + left[None, :],
        mean_left / total[:, None],
        has_position[:, None] & has_left[None, :],
    )
    if RIGHT:
        tl.store(
            means + rows + right[None, :],
            mean_right / total[:, None],
            has_position[:, None] & has_right[None, :],
        )
    tl.store(log_sums + user * num_positions + positions, largest + tl.log(total), has_position)


@triton.jit
def _moved(theta, start, factor, offsets, inside, gradient, along, inverse, eta, penalty):
    now, before = _settled(theta, start, factor, offsets, inside, "evict_first")
    gradient = (gradient - now * along[:, None]) * inverse[:, None]
    now -= eta * (gradient + penalty * (now - before))
    tl.store(theta + offsets, now, inside)
    way = tl.where(inside, now - before, 0.0)
    return tl.sum(way * way, 1).to(tl.float64)


@triton.jit
def _step_kernel(
    theta,
    start,
    factors,
    outputs,
    gradients,
    alongs,
    log_sums,
    weights,
    labels,
    ids,
    squared,
    eta,
    penalty,
    num_words,
    num_positions,
    words_a_program,
    WIDTH: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    POSITIONS: tl.constexpr,
    WORDS: tl.constexpr,
    SMALLEST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    user = tl.program_id(1).to(tl.int64)
    factor = tl.load(factors + user)
    theta += user * num_words * WIDTH
    outputs += user * num_positions * WIDTH
    gradients += user * num_positions * WIDTH
    left = tl.arange(0, LEFT)
    has_left = left < WIDTH
    if RIGHT:
        right = LEFT + tl.arange(0, RIGHT)
        has_right = right < WIDTH
    way = tl.zeros((WORDS,), tl.float64)
    begin = tl.program_id(0) * words_a_program
    for first in range(begin, tl.minimum(begin + words_a_program, num_words), WORDS):
        words = first + tl.arange(0, WORDS)
        exists = words < num_words
        places = words[:, None] * WIDTH
        in_left = exists[:, None] & has_left[None, :]
        word_left, _ = _settled(theta, start, factor, places + left[None, :], in_left, "")
        squares = tl.sum(word_left * word_left, 1)
        if RIGHT:
            in_right = exists[:, None] & has_right[None, :]
            word_right, _ = _settled(theta, start, factor, places + right[None, :], in_right, "")
            squares += tl.sum(word_right * word_right, 1)
        length = tl.sqrt(squares)
        inverse = 1.0 / tl.maximum(length, SMALLEST)
        along = tl.zeros((WORDS,), tl.float32)
        of_left = tl.zeros((WORDS, LEFT), tl.float32)
        if RIGHT:
            of_right = tl.zeros((WORDS, RIGHT), tl.float32)
        for block in range(0, num_positions, POSITIONS):
            positions = block + tl.arange(0, POSITIONS)
            has_position = positions < num_positions
            rows = positions[:, None] * WIDTH
            numbers = user * num_positions + positions
            reads_left = has_position[:, None] & has_left[None, :]
            out_left = tl.load(outputs + rows + left[None, :], reads_left, 0.0)
            logits = tl.dot(word_left, tl.trans(out_left), input_precision=PRECISION)
            if RIGHT:
                reads_right = has_position[:, None] & has_right[None, :]
                out_right = tl.load(outputs + rows + right[None, :], reads_right, 0.0)
                logits = tl.dot(word_right, tl.trans(out_right), logits, input_precision=PRECISION)
            # A position that does not exist has no share of any word.
            log_sum = tl.load(log_sums + numbers, has_position, float("inf"))
            weight = tl.load(weights + numbers, has_position, 0.0)
            label = tl.load(labels + numbers, has_position, -1)
            logits *= inverse[:, None]
            shares = tl.exp(logits - log_sum[None, :])
            shares = tl.where(words[:, None] == label[None, :], shares - 1.0, shares)
            shares *= weight[None, :]
            along += tl.sum(shares * logits, 1)
            of_left = tl.dot(shares, out_left, of_left, input_precision=PRECISION)
            if RIGHT:
                of_right = tl.dot(shares, out_right, of_right, input_precision=PRECISION)
            # The words that went in. A sum over equal words in a fixed order is a product.
            entered = tl.load(ids + numbers, has_position, -1)
            is_word = (words[:, None] == entered[None, :]).to(tl.float32)
            if tl.sum(is_word) > 0:
                own_along = tl.load(alongs + numbers, has_position, 0.0)
                along += tl.sum(is_word * own_along[None, :], 1)
                own_left = tl.load(gradients + rows + left[None, :], reads_left, 0.0)
                of_left = tl.dot(is_word, own_left, of_left, input_precision=PRECISION)
                if RIGHT:
                    own_right = tl.load(gradients + rows + right[None, :], reads_right, 0.0)
                    of_right = tl.dot(is_word, own_right, of_right, input_precision=PRECISION)
        # The gradient along a word turns nothing. A length below the smallest is a constant.
        along = tl.where(length >= SMALLEST, along * inverse, 0.0)
        # The rows are read again: kept until here, they would crowd out everything else.
        way += _moved(
            theta,
            start,
            factor,
            places + left[None, :],
            in_left,
            of_left,
            along,
            inverse,
            eta,
            penalty,
        )
        if RIGHT:
            way += _moved(
                theta,
                start,
                factor,
                places + right[None, :],
                in_right,
                of_right,
                along,
                inverse,
                eta,
                penalty,
            )
    tl.store(squared + user * tl.num_programs(0) + tl.program_id(0), tl.sum(way))


class TritonWords:
    """The users' tables, as `stacked.words.TorchWords`."""

    def __init__(self, theta_UVD: Tensor, start_VD: Tensor, smallest: float) -> None:
        self._theta, self._start = theta_UVD, start_VD.contiguous()
        self._smallest = smallest

    def begin(self, users: slice, factor_U: Tensor) -> None:
        """A local step of these users begins."""
        self._table, self._factor_U = self._theta[users], factor_U.contiguous()

    def rows(self, ids_UN: Tensor) -> Tensor:
        """The words w of these ids, (U, N, D)."""
        factor = self._factor_U[:, None, None]
        before = self._start[ids_UN]
        wide = ids_UN[..., None].expand_as(before)
        moved = torch.where(factor > 0, self._table.gather(1, wide) - before, 0.0)
        found = before + factor * moved
        return found / found.norm(dim=2, keepdim=True).clamp(min=self._smallest)

    def output_gradient(self, out_UND: Tensor, labels_UN: Tensor, weights_UN: Tensor) -> Tensor:
        """The gradient of the outputs o; a position of weight zero may have any valid label."""
        self._out, self._labels = out_UND.contiguous(), labels_UN.contiguous()
        self._weights = weights_UN.contiguous()
        users, positions, width = self._out.shape
        means = torch.empty_like(self._out)
        self._log_sums = means.new_empty((users, positions))
        constants = _constants(ATTENTION, positions, width, self._smallest)
        _attention_kernel[(-(-positions // constants["POSITIONS"]), users)](
            self._table,
            self._start,
            self._factor_U,
            self._out,
            means,
            self._log_sums,
            self._table.shape[1],
            positions,
            **constants,
        )
        return (means - self.rows(self._labels)) * self._weights[..., None]

    def step(
        self, ids_UN: Tensor, inputs_UND: Tensor, gradient_UND: Tensor, eta: float, penalty: float
    ) -> Tensor:
        """theta - eta grad, in place; returns the squared way from the beginning, (U,)."""
        # How far each word's gradient goes along the word itself.
        alongs = (inputs_UND * gradient_UND).sum(2)
        users, positions, width = self._out.shape
        num_words = self._table.shape[1]
        constants = _constants(STEP, positions, width, self._smallest)
        tiles = -(-num_words // constants["WORDS"])
        a_program = -(-tiles // _SPLITS) * constants["WORDS"]
        squared = torch.zeros((users, _SPLITS), dtype=torch.float64, device=self._out.device)
        _step_kernel[(_SPLITS, users)](
            self._table,
            self._start,
            self._factor_U,
            self._out,
            gradient_UND.contiguous(),
            alongs,
            self._log_sums,
            self._weights,
            self._labels,
            ids_UN.contiguous(),
            squared,
            eta,
            penalty,
            num_words,
            positions,
            a_program,
            **constants,
        )
        return squared.sum(1)
