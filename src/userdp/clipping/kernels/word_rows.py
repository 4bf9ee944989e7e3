"""CUDA kernels for single rows of the stacked embedding tables: words that enter or are labels.

A local step touches few words beside the softmax over all of them. `rows` reads the words that go
in. `pulls` adds up, for every word that enters or is a label, what these positions add to the
gradient of w_v (`stacked.words`): the inputs' gradients x'_t, and -k_t o_t where v is the label. A
word's sum stands at its first place among inputs and labels, and `slots` says where that is. So
every sum has one writer and a fixed order.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from userdp.clipping.kernels.word_table import settled

_PLACES = 16


@triton.jit
def _rows_kernel(
    theta,
    start,
    factors,
    ids,
    rows,
    num_words,
    num_positions,
    user_stride,
    row_stride,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    position, user = tl.program_id(0), tl.program_id(1).to(tl.int64)
    factor = tl.load(factors + user)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    word = tl.load(ids + user * num_positions + position)
    theta += user * num_words * WIDTH
    row = settled(theta, start, factor, word * WIDTH + column, inside)
    length = tl.maximum(tl.sqrt(tl.sum(row * row)), SMALLEST)
    tl.store(rows + user * user_stride + position * row_stride + column, row / length, inside)


@triton.jit
def _pulls_kernel(
    theta,
    start,
    factors,
    words,
    of_inputs,
    outputs,
    weights,
    slots,
    pulls,
    alongs,
    num_words,
    num_positions,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PLACES: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    place, user = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_places = 2 * num_positions
    words += user * num_places
    word = tl.load(words + place)
    earlier = 0
    for begin in range(0, place, PLACES):
        others = begin + tl.arange(0, PLACES)
        earlier += tl.sum((tl.load(words + others, others < place, -1) == word).to(tl.int32))
    if earlier == 0:
        column = tl.arange(0, PADDED)
        inside = column < WIDTH
        of_inputs += user * num_positions * WIDTH
        outputs += user * num_positions * WIDTH
        weights += user * num_positions
        total = tl.zeros((PADDED,), tl.float32)
        for begin in range(0, num_places, PLACES):
            others = begin + tl.arange(0, PLACES)
            same = tl.load(words + others, others < num_places, -1) == word
            if tl.sum(same.to(tl.int32)) > 0:
                enters = (same & (others < num_positions))[:, None] & inside[None, :]
                total += tl.sum(
                    tl.load(of_inputs + others[:, None] * WIDTH + column[None, :], enters, 0.0), 0
                )
                others -= num_positions
                came = same & (others >= 0)
                output = tl.load(
                    outputs + others[:, None] * WIDTH + column[None, :],
                    came[:, None] & inside[None, :],
                    0.0,
                )
                total -= tl.sum(output * tl.load(weights + others, came, 0.0)[:, None], 0)
        factor = tl.load(factors + user)
        theta += user * num_words * WIDTH
        row = settled(theta, start, factor, word * WIDTH + column, inside)
        length = tl.maximum(tl.sqrt(tl.sum(row * row)), SMALLEST)
        tl.store(pulls + (user * num_places + place) * WIDTH + column, total, inside)
        tl.store(alongs + user * num_places + place, tl.sum(row * total) / length)
        tl.store(slots + user * num_words + word, place + 1)


def rows_into(
    rows_UND: Tensor,
    theta_UVD: Tensor,
    start_VD: Tensor,
    factor_U: Tensor,
    ids_UN: Tensor,
    smallest: float,
) -> None:
    """Write the words w of these ids, which have length 1. The last dimension must be dense."""
    users, positions, width = rows_UND.shape
    _rows_kernel[(positions, users)](
        theta_UVD,
        start_VD,
        factor_U,
        ids_UN,
        rows_UND,
        theta_UVD.shape[1],
        positions,
        rows_UND.stride(0),
        rows_UND.stride(1),
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        SMALLEST=smallest,
        num_warps=1,
    )


def pulls(
    theta_UVD: Tensor,
    start_VD: Tensor,
    factor_U: Tensor,
    words_UE: Tensor,
    of_inputs_UND: Tensor,
    outputs_UND: Tensor,
    weights_UN: Tensor,
    smallest: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """For each word its place plus one or zero, the sums at places, and their part along the word.

    `words_UE` are the inputs, then the labels.
    """
    users, positions, width = outputs_UND.shape
    num_words = theta_UVD.shape[1]
    slots = torch.zeros((users, num_words), dtype=torch.int32, device=theta_UVD.device)
    sums = outputs_UND.new_empty((users, 2 * positions, width))
    alongs = sums.new_empty(words_UE.shape)
    _pulls_kernel[(2 * positions, users)](
        theta_UVD,
        start_VD,
        factor_U,
        words_UE,
        of_inputs_UND,
        outputs_UND,
        weights_UN,
        slots,
        sums,
        alongs,
        num_words,
        positions,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        PLACES=_PLACES,
        SMALLEST=smallest,
        num_warps=1,
    )
    return slots, sums, alongs
