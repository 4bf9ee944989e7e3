"""CUDA kernels: normal numbers by position, drawn and added to a buffer in one pass.

A position's number follows from a key and from the position alone, so a slice of a buffer that is
drawn by itself is that slice of the whole. Positions are counted in tiles of `TILE`. Pair m of a
tile, m < TILE / 2, is a pair of independent normal numbers by Box and Muller. The first one belongs
to position m of the tile, the second one to position m + TILE / 2. A pair takes three words of 32
random bits:

  * philox: Philox4x32-10 (Salmon et al. 2011). Of the stream's key of 128 bits, the first 64 are
    Philox's key and the last 64 are the upper half of its counter. The lower half is the number of
    the pair, counted from the buffer's beginning. The first three of the four words are taken.
  * chacha20: RFC 8439, with the stream's key of 256 bits and a nonce of zeros. Lane n of a tile,
    n < TILE / 8, computes the block with counter tile * TILE / 8 + n. Words 4 j to 4 j + 2 of it
    are those of pair n + j * TILE / 8.

Two words are the radius, r = sqrt(-2 ln u) with u = (k + 1/2) / 2^64. The third is the angle.

Where the numbers end, and how close they lie (`draw` says why it matters):

  * The smallest u is 2^-65, so r ends at 9.49. Up to r = 7.4 u still has 24 digits.
  * Above u = 1/2 it is 1 - u that is rounded to float32. So small radii have all digits, too, and
    the centre has no rings; r is never 0.
  * Logarithm, sine and cosine are polynomials, right to 2e-7 (relative). They have no tables, whose
    steps would show in the density. The root is rounded correctly.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048
# Words of a key in the table that the kernels read.
KEY_WORDS = 8
# Lanes that draw, and pairs that each of them draws.
_LANES = {"philox": (TILE // 2, 1), "chacha20": (TILE // 8, 4)}


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Four words of Philox4x32-10 from a counter and a key of words."""
    for _ in tl.static_range(10):
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = b.to(tl.uint32)
        c3 = a.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _quarter(a, b, c, d):
    a += b
    d ^= a
    d = (d << 16) | (d >> 16)
    c += d
    b ^= c
    b = (b << 12) | (b >> 20)
    a += b
    d ^= a
    d = (d << 8) | (d >> 24)
    c += d
    b ^= c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def chacha20(k0, k1, k2, k3, k4, k5, k6, k7, counter, n0, n1, n2):
    """The sixteen words of a block of ChaCha20 (RFC 8439, Sec. 2.3)."""
    zero = counter ^ counter
    s0, s1, s2, s3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    x0, x1, x2, x3 = s0, s1, s2, s3
    x4, x5, x6, x7 = zero + k0, zero + k1, zero + k2, zero + k3
    x8, x9, x10, x11 = zero + k4, zero + k5, zero + k6, zero + k7
    x12, x13, x14, x15 = counter, zero + n0, zero + n1, zero + n2
    for _ in tl.static_range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    x0, x1, x2, x3 = x0 + s0, x1 + s1, x2 + s2, x3 + s3
    x4, x5, x6, x7 = x4 + k0, x5 + k1, x6 + k2, x7 + k3
    x8, x9, x10, x11 = x8 + k4, x9 + k5, x10 + k6, x11 + k7
    x12, x13, x14, x15 = x12 + counter, x13 + n0, x14 + n1, x15 + n2
    return x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15


@triton.jit
def normal_pair(high, low, angle):
    """Two independent normal numbers from three words of 32 random bits."""
    # v is u, or 1 - u where that is smaller: either has all digits of float32.
    is_above = high >= 0x80000000
    flip = tl.where(is_above, 0xFFFFFFFF, 0).to(tl.uint32)
    v = (high ^ flip).to(tl.float32) * 2.3283064365386963e-10
    v += ((low ^ flip).to(tl.float32) + 0.5) * 5.421010862427522e-20
    # -ln u = -ln(1 + f) - exponent ln 2, with f in [-1/2, 0).
    bits = v.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    exponent = tl.where(is_above, 0, (bits >> 23) - 126).to(tl.float32)
    f = tl.where(is_above, -v, mantissa - 1.0)
    log = 1.4425228834152222 * f + 1.6986658573150635
    log = log * f + 1.2600104808807373
    log = log * f + 0.20453974604606628
    log = log * f + 0.26985013484954834
    log = log * f - 0.24277445673942566
    log = log * f + 0.33370256423950195
    log = log * f - 0.49999281764030457
    log = log * f + 1.0
    radius = tl.sqrt_rn(-2.0 * (log * f + 0.6931471805599453 * exponent))
    # An eighth of a turn to either side. One more bit exchanges the two numbers, another one turns
    # the cosine around: that is the whole circle.
    x = ((angle & 0x3FFFFFFF).to(tl.int32) - 0x20000000).to(tl.float32) + 0.5
    x *= 1.4629180792671596e-09
    x2 = x * x
    sine = (-0.0001950396253960207 * x2 + 0.008332036435604095) * x2 - 0.16666650772094727
    sine = (sine * x2) * x + x
    cosine = (2.4379880414926447e-05 * x2 - 0.0013886619126424193) * x2 + 0.04166661575436592
    cosine = (cosine * x2 - 0.5) * x2 + 1.0
    cosine = tl.where((angle & 0x40000000) != 0, -cosine, cosine)
    is_exchanged = angle >= 0x80000000
    first = radius * tl.where(is_exchanged, sine, cosine)
    second = radius * tl.where(is_exchanged, cosine, sine)
    return first, second


@triton.jit
def _key(keys, word: tl.constexpr):
    return tl.load(keys + word).to(tl.uint32, bitcast=True)


@triton.jit
def tile_words(keys, tile, lanes, STREAM: tl.constexpr):
    """The words of a tile's pairs: three for each pair of a lane. `keys` points to one key."""
    if STREAM == "philox":
        low = (tile.to(tl.uint32) << 10) | lanes.to(tl.uint32)
        zero = low ^ low
        high = zero + (tile >> 22).to(tl.uint32)
        c2, c3 = zero + _key(keys, 2), zero + _key(keys, 3)
        w0, w1, w2, _ = philox(low, high, c2, c3, _key(keys, 0), _key(keys, 1))
        return w0, w1, w2
    else:
        counter = (tile.to(tl.uint32) << 8) | lanes.to(tl.uint32)
        k0, k1, k2, k3 = _key(keys, 0), _key(keys, 1), _key(keys, 2), _key(keys, 3)
        k4, k5, k6, k7 = _key(keys, 4), _key(keys, 5), _key(keys, 6), _key(keys, 7)
        zero = k0 ^ k0
        w0, w1, w2, _, w4, w5, w6, _, w8, w9, w10, _, w12, w13, w14, _ = chacha20(
            k0, k1, k2, k3, k4, k5, k6, k7, counter, zero, zero, zero
        )
        return w0, w1, w2, w4, w5, w6, w8, w9, w10, w12, w13, w14


@triton.jit
def _add_at(values, places, noise, count, is_whole):
    # A whole tile needs no mask, so its values are read many at a time.
    if is_whole:
        tl.store(values + places, tl.load(values + places) + noise)
    else:
        mask = (places >= 0) & (places < count)
        tl.store(values + places, tl.load(values + places, mask, 0.0) + noise, mask)


@triton.jit
def gaussian_kernel(
    values,
    keys,
    stddev,
    first_tile,
    shift,
    count,
    UNIT: tl.constexpr,
    STREAM: tl.constexpr,
    LANES: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Add normal numbers to `count` units of values that begin at unit `shift` of a tile."""
    program = tl.program_id(0)
    count = count.to(tl.int64) * UNIT
    shift *= UNIT
    lanes = tl.arange(0, LANES)
    words = tile_words(keys, first_tile + program, lanes, STREAM)
    start = program.to(tl.int64) * (2 * LANES * PAIRS) - shift
    is_whole = (start >= 0) & (start + 2 * LANES * PAIRS <= count)
    for pair in tl.static_range(PAIRS):
        first, second = normal_pair(words[3 * pair], words[3 * pair + 1], words[3 * pair + 2])
        places = start + pair * LANES + lanes
        _add_at(values, places, stddev * first, count, is_whole)
        _add_at(values, places + LANES * PAIRS, stddev * second, count, is_whole)


def add_normal_(values: Tensor, *, offset: int, stddev: float, randomness: str, key: bytes) -> None:
    """Add N(0, stddev^2) to float32 `values`, the positions from `offset` on, in one launch."""
    grid, places = launch(values, offset)
    gaussian_kernel[grid](
        values, key_table([key], values.device), stddev, **places, **lanes_of(randomness)
    )


def launch(values: Tensor, offset: int) -> tuple[tuple[int], dict[str, int]]:
    """The grid of tiles, and where the values lie, in units that say what is aligned."""
    assert values.dtype == torch.float32
    assert values.is_contiguous()
    first_tile, shift = divmod(offset, TILE)
    count = values.numel()
    unit = 4 if shift % 4 == 0 and count % 4 == 0 else 1
    places = {"shift": shift // unit, "count": count // unit, "UNIT": unit}
    return (triton.cdiv(shift + count, TILE),), {"first_tile": first_tile, **places}


def lanes_of(randomness: str) -> dict[str, int | str]:
    """The kernel's constants for a kind of stream, and how many warps they take."""
    lanes, pairs = _LANES[randomness]
    return {"STREAM": randomness, "LANES": lanes, "PAIRS": pairs, "num_warps": lanes // 128}


def key_table(keys: Sequence[bytes], device: torch.device) -> Tensor:
    """Keys as a table of words on the device, one a row."""
    padded = b"".join(key.ljust(4 * KEY_WORDS, b"\0") for key in keys)
    table = torch.frombuffer(bytearray(padded), dtype=torch.int32)
    return table.view(-1, KEY_WORDS).to(device, non_blocking=True)
