"""CUDA kernels for the rest of a local step: clipping, squared ways, and LSTM cells.

`stacked.room.settle_`, `stacked.lstm` and `stacked.cells` are the reference. A program works for
one user alone.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from userdp.clipping.kernels.word_table import is_positive

_BLOCK = 1024


@triton.jit
def _settle_kernel(theta, start, factors, size, parts, BLOCK: tl.constexpr):
    number = tl.program_id(1).to(tl.int64)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    factor = tl.load(factors + number)
    # A copy whose factor is one stays as it is.
    inside &= is_positive(tl.abs(1 - factor))
    before = tl.load(start + (number % parts) * size + offsets, inside, 0.0)
    # What is not finite has the factor zero: it is not read.
    now = tl.load(theta + number * size + offsets, inside & is_positive(factor), 0.0)
    tl.store(theta + number * size + offsets, before + factor * (now - before), inside)


@triton.jit
def _squared_kernel(theta, start, out, size, parts, BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, size, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        inside = offsets < size
        before = tl.load(start + (number % parts) * size + offsets, inside, 0.0)
        now = tl.load(theta + number * size + offsets, inside, 0.0)
        way = (now - before).to(tl.float64)
        total += way * way
    tl.store(out + number, tl.sum(total))


@triton.jit
def _sum_kernel(theta, start, factors, weights, out, size, parts, users, BLOCK: tl.constexpr):
    part = tl.program_id(1).to(tl.int64)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    before = tl.load(start + part * size + offsets, inside, 0.0)
    total = tl.zeros((BLOCK,), tl.float64)
    for user in range(users):
        number = user * parts + part
        factor = tl.load(factors + number)
        weight = tl.load(weights + number)
        # What is not finite has the factor zero: it is not read.
        counts = inside & is_positive(factor)
        now = tl.load(theta + number * size + offsets, counts, 0.0)
        way = tl.where(counts, factor * (now - before), 0.0)
        total += way.to(tl.float64) * weight
    tl.store(out + part * size + offsets, total.to(tl.float32), inside)


@triton.jit
def _tanh(x):
    # The quotient loses digits near zero, where a few terms of the series are exact.
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    shrunk = tl.exp(-2 * tl.abs(x))
    quotient = (1 - shrunk) / (1 + shrunk)
    return tl.where(square < 0.01, series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def _cell_kernel(
    gates,
    biases,
    cells,
    states,
    first,
    records,
    positions,
    state_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    user = tl.program_id(1).to(tl.int64)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < records * SIZE
    record, unit = offsets // SIZE, offsets % SIZE
    place = gates + (user * positions + first + record) * (4 * SIZE) + unit
    bias = biases + user * (4 * SIZE) + unit
    enter = tl.sigmoid(tl.load(place, inside, 0.0) + tl.load(bias))
    keep = tl.sigmoid(tl.load(place + SIZE, inside, 0.0) + tl.load(bias + SIZE))
    new = _tanh(tl.load(place + 2 * SIZE, inside, 0.0) + tl.load(bias + 2 * SIZE))
    leave = tl.sigmoid(tl.load(place + 3 * SIZE, inside, 0.0) + tl.load(bias + 3 * SIZE))
    slot = user * (positions + records) + first + record
    cell = keep * tl.load(cells + slot * SIZE + unit, inside, 0.0) + enter * new
    tl.store(place, enter, inside)
    tl.store(place + SIZE, keep, inside)
    tl.store(place + 2 * SIZE, new, inside)
    tl.store(place + 3 * SIZE, leave, inside)
    after = slot + records
    tl.store(cells + after * SIZE + unit, cell, inside)
    tl.store(states + after * state_stride + unit, leave * _tanh(cell), inside)


@triton.jit
def _cell_gradient_kernel(
    gates,
    cells,
    of_states,
    of_cells,
    first,
    records,
    positions,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    user = tl.program_id(1).to(tl.int64)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < records * SIZE
    record, unit = offsets // SIZE, offsets % SIZE
    row = user * positions + first + record
    place = gates + row * (4 * SIZE) + unit
    enter = tl.load(place, inside, 0.0)
    keep = tl.load(place + SIZE, inside, 0.0)
    new = tl.load(place + 2 * SIZE, inside, 0.0)
    leave = tl.load(place + 3 * SIZE, inside, 0.0)
    slot = user * (positions + records) + first + record
    before = tl.load(cells + slot * SIZE + unit, inside, 0.0)
    bent = _tanh(tl.load(cells + (slot + records) * SIZE + unit, inside, 0.0))
    of_state = tl.load(of_states + row * SIZE + unit, inside, 0.0)
    carried = of_cells + user * records * SIZE + offsets
    of_cell = tl.load(carried, inside, 0.0) + of_state * leave * (1 - bent * bent)
    tl.store(place, of_cell * new * enter * (1 - enter), inside)
    tl.store(place + SIZE, of_cell * before * keep * (1 - keep), inside)
    tl.store(place + 2 * SIZE, of_cell * enter * (1 - new * new), inside)
    tl.store(place + 3 * SIZE, of_state * bent * leave * (1 - leave), inside)
    tl.store(carried, of_cell * keep, inside)


def settle_(theta_UGX: Tensor, start_GX: Tensor, factor_UG: Tensor) -> None:
    """theta^0 + factor (theta - theta^0) in place."""
    users, parts = factor_UG.shape
    size = start_GX[0].numel()
    _settle_kernel[(triton.cdiv(size, _BLOCK), users * parts)](
        theta_UGX, start_GX, factor_UG.contiguous(), size, parts, BLOCK=_BLOCK
    )


def squared_ways(theta_UGX: Tensor, start_GX: Tensor) -> Tensor:
    """The squared distance of every user's parts from the beginning, (U, G), in float64."""
    users, parts = theta_UGX.shape[:2]
    out = torch.empty((users, parts), dtype=torch.float64, device=theta_UGX.device)
    size = start_GX[0].numel()
    _squared_kernel[(users * parts,)](theta_UGX, start_GX, out, size, parts, BLOCK=_BLOCK)
    return out


def summed_ways(
    theta_UGX: Tensor, start_GX: Tensor, factor_UG: Tensor, weight_UG: Tensor
) -> Tensor:
    """The users' ways from the beginning, clipped by their factors and weighted, in one sum.

    The weights are float64, and so is the sum until it is written.
    """
    users, parts = factor_UG.shape
    out = torch.empty_like(start_GX)
    size = start_GX[0].numel()
    _sum_kernel[(triton.cdiv(size, _BLOCK), parts)](
        theta_UGX,
        start_GX,
        factor_UG.contiguous(),
        weight_UG.contiguous(),
        out,
        size,
        parts,
        users,
        BLOCK=_BLOCK,
    )
    return out


def cell(
    gates: Tensor, bias: Tensor, cells: Tensor, states: Tensor, first: int, records: int
) -> None:
    """One position forward: gates become their values, and the next cells and states are set.

    `bias` (users, gates times state) is dense.
    """
    users, positions, wide = gates.shape
    size = wide // 4
    _cell_kernel[(triton.cdiv(records * size, _BLOCK), users)](
        gates,
        bias,
        cells,
        states,
        first,
        records,
        positions,
        states.stride(1),
        SIZE=size,
        BLOCK=_BLOCK,
    )


def cell_gradient(
    gates: Tensor, cells: Tensor, of_states: Tensor, of_cells: Tensor, first: int, records: int
) -> None:
    """One position backward: the gates' values become the gradients before their functions."""
    users, positions, wide = gates.shape
    size = wide // 4
    _cell_gradient_kernel[(triton.cdiv(records * size, _BLOCK), users)](
        gates, cells, of_states, of_cells, first, records, positions, SIZE=size, BLOCK=_BLOCK
    )
