"""CUDA kernels of correlated noise: one pass over the stored vectors, or none stored at all.

`advance_kernel` reads the b - 1 stored vectors once, draws z, stores w in the place of the oldest
vector and adds it: b + 2 vectors of traffic, counting the values read and written. What is stored
is what is added, bit for bit, and sums are taken in float64 (`correlate` says why).

`redrawn_kernel` stores nothing: it draws the z of the past steps again, in registers, and sums them
in float64.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from userdp.noise.kernels import (
    KEY_WORDS,
    add_normal_,
    key_table,
    lanes_of,
    launch,
    normal_pair,
    tile_words,
)

# Stored vectors that are loaded ahead, and warps: the fastest of twelve choices on an H200.
_AHEAD = 8
_WARPS = {"philox": 4, "chacha20": 2}


@triton.jit
def _noise_at(past, row, places, z, newest, count, mask, KEPT: tl.constexpr, AHEAD: tl.constexpr):
    """w at these places: row[0] * (z - sum_j row[j] w_j), the sum in float64."""
    noise = z.to(tl.float64)
    for first in range(0, KEPT, AHEAD):
        for ahead in tl.static_range(AHEAD):
            back = first + ahead + 1
            is_kept = back <= KEPT
            place = newest - back
            place = tl.where(place < 0, place + KEPT, place).to(tl.int64)
            coefficient = tl.load(row + back, is_kept, 0.0)
            old = tl.load(past + place * count + places, mask & is_kept, 0.0)
            noise -= coefficient * old.to(tl.float64)
    return (noise * tl.load(row)).to(tl.float32)


@triton.jit
def _advance_at(
    values,
    past,
    row,
    places,
    z,
    stddev,
    newest,
    count,
    is_whole,
    KEPT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Add w at these places of a vector of `count` numbers, and store it."""
    stored = past + newest.to(tl.int64) * count + places
    # A whole tile needs no mask, so its values are read many at a time.
    if is_whole:
        added = _noise_at(past, row, places, z, newest, count, True, KEPT, AHEAD)
        tl.store(stored, added)
        tl.store(values + places, tl.load(values + places) + stddev * added)
    else:
        mask = (places >= 0) & (places < count)
        added = _noise_at(past, row, places, z, newest, count, mask, KEPT, AHEAD)
        tl.store(stored, added, mask)
        tl.store(values + places, tl.load(values + places, mask, 0.0) + stddev * added, mask)


@triton.jit(do_not_specialize=["newest"])
def advance_kernel(
    values,
    past,
    row,
    keys,
    stddev,
    newest,
    first_tile,
    shift,
    count,
    UNIT: tl.constexpr,
    STREAM: tl.constexpr,
    LANES: tl.constexpr,
    PAIRS: tl.constexpr,
    KEPT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Add stddev * w, w = row[0] * (z - sum_j row[j] w_j), and store w at place `newest`."""
    program = tl.program_id(0)
    count = count.to(tl.int64) * UNIT
    shift *= UNIT
    lanes = tl.arange(0, LANES)
    words = tile_words(keys, first_tile + program, lanes, STREAM)
    start = program.to(tl.int64) * (2 * LANES * PAIRS) - shift
    is_whole = (start >= 0) & (start + 2 * LANES * PAIRS <= count)
    for pair in tl.static_range(PAIRS):
        z0, z1 = normal_pair(words[3 * pair], words[3 * pair + 1], words[3 * pair + 2])
        at = start + pair * LANES + lanes
        _advance_at(values, past, row, at, z0, stddev, newest, count, is_whole, KEPT, AHEAD)
        at += LANES * PAIRS
        _advance_at(values, past, row, at, z1, stddev, newest, count, is_whole, KEPT, AHEAD)


@triton.jit
def redrawn_kernel(
    values,
    coefficients,
    keys,
    stddev,
    first_tile,
    shift,
    count,
    UNIT: tl.constexpr,
    LANES: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    KEY_WORDS: tl.constexpr,
):
    """Add stddev * sum_j coefficients[j] z_j, with z_j drawn from the j-th key by Philox."""
    program = tl.program_id(0)
    count = count.to(tl.int64) * UNIT
    shift *= UNIT
    lanes = tl.arange(0, LANES)
    first = tl.zeros((LANES,), tl.float64)
    second = tl.zeros((LANES,), tl.float64)
    for back in range(NUM_KEYS):
        key = keys + back * KEY_WORDS
        words = tile_words(key, first_tile + program, lanes, "philox")
        z0, z1 = normal_pair(words[0], words[1], words[2])
        coefficient = tl.load(coefficients + back)
        first += coefficient * z0.to(tl.float64)
        second += coefficient * z1.to(tl.float64)
    places = program.to(tl.int64) * (2 * LANES) - shift + lanes
    mask = (places >= 0) & (places < count)
    tl.store(
        values + places, tl.load(values + places, mask, 0.0) + stddev * first.to(tl.float32), mask
    )
    places += LANES
    mask = (places >= 0) & (places < count)
    tl.store(
        values + places, tl.load(values + places, mask, 0.0) + stddev * second.to(tl.float32), mask
    )


def advance_(
    values: Tensor,
    past: Tensor,
    row: Sequence[float],
    *,
    offset: int,
    stddev: float,
    step: int,
    randomness: str,
    key: bytes,
) -> None:
    """As `correlate.advance_`, in one launch, for float32 values."""
    assert past.dtype == torch.float32
    assert past.is_contiguous()
    kept = len(past)
    grid, places = launch(values, offset)
    # Early steps have short rows. What is left out is zero, and so are the vectors there.
    padded = torch.zeros(kept + 1, dtype=torch.float64)
    padded[: len(row)] = torch.tensor(row, dtype=torch.float64)
    padded[0] = 1 / row[0]
    advance_kernel[grid](
        values,
        past,
        padded.to(values.device, non_blocking=True),
        key_table([key], values.device),
        stddev,
        step % kept,
        **places,
        KEPT=kept,
        AHEAD=min(_AHEAD, kept),
        **lanes_of(randomness) | {"num_warps": _WARPS[randomness]},
    )


def add_redrawn_(
    values: Tensor,
    coefficients: Sequence[float],
    keys: Sequence[bytes],
    *,
    offset: int,
    stddev: float,
    randomness: str,
) -> None:
    """Add stddev * sum_j coefficients[j] z_j, with z_j drawn from the j-th key: nothing is stored.

    One launch by Philox. By ChaCha20 it is one launch for each key.
    """
    if randomness != "philox":
        for coefficient, key in zip(coefficients, keys, strict=True):
            scaled = stddev * coefficient
            add_normal_(values, offset=offset, stddev=scaled, randomness=randomness, key=key)
        return
    grid, places = launch(values, offset)
    constants = lanes_of(randomness)
    redrawn_kernel[grid](
        values,
        torch.tensor(list(coefficients), dtype=torch.float64).to(values.device, non_blocking=True),
        key_table(keys, values.device),
        stddev,
        **places,
        LANES=constants["LANES"],
        NUM_KEYS=len(keys),
        KEY_WORDS=KEY_WORDS,
        num_warps=constants["num_warps"],
    )
