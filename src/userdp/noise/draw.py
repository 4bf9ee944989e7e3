"""Normal numbers on tensors, by position, from a run's streams."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from userdp.streams import Streams

PURPOSE = "noise"
NUMBER_PURPOSE = "noise on a number"
# The flat buffer is cut into pieces of this many numbers, and each has a stream of its own. Noise
# for all weights at once need not be held, and a piece is still in a GPU's cache when it is added.
PIECE = 2**23


def add_normal_(
    values: Tensor, *, offset: int, size: int, stddev: float, step: int, streams: Streams
) -> None:
    """Add N(0, stddev^2) to every number, in place and in the tensor's own (wide) dtype.

    `values` are the positions from `offset` on in a flat buffer of `size` numbers. No two positions
    share a draw, and a position's draw does not depend on how the buffer is divided.
    """
    if stddev == 0:
        return
    flat = values.view(-1)
    for held, noise in normal_pieces(flat, offset=offset, size=size, step=step, streams=streams):
        flat[held].add_(noise, alpha=stddev)


def normal_pieces(
    flat: Tensor, *, offset: int, size: int, step: int, streams: Streams
) -> Iterator[tuple[slice, Tensor]]:
    """Unit normal numbers for `flat`, which is not changed: where they go, and the numbers.

    `flat` are the positions from `offset` on in a buffer of `size` numbers.
    """
    draw = _cuda_piece if flat.device.type == "cuda" else _cpu_piece
    for piece in range(offset // PIECE, -(-(offset + len(flat)) // PIECE)):
        start = piece * PIECE
        # A piece is always drawn whole: on CUDA a number depends on how many are drawn with it.
        noise = draw(flat, min(PIECE, size - start), streams.key(step, piece))
        first, last = max(start, offset), min(start + len(noise), offset + len(flat))
        yield slice(first - offset, last - offset), noise[first - start : last - start]


def noisy_number(value: float, *, noise_stddev: float, streams: Streams, step: int) -> float:
    """One number plus N(0, noise_stddev^2)."""
    return value + noise_stddev * float(streams.rng(step).standard_normal())


def _cpu_piece(like: Tensor, count: int, key: bytes) -> Tensor:
    # numpy's Philox takes a 128-bit key. torch's own CPU generator uses 32 bits of its seed, few
    # enough to try them all.
    rng = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    dtype = "f8" if like.dtype == torch.float64 else "f4"
    return torch.from_numpy(rng.standard_normal(count, dtype=dtype)).to(like.device)


def _cuda_piece(like: Tensor, count: int, key: bytes) -> Tensor:
    # torch's CUDA generator is Philox with a 64-bit seed and a 64-bit offset that must be a
    # multiple of four; both come from the stream's key.
    generator = torch.Generator(device=like.device)
    generator.manual_seed(int.from_bytes(key[:8], "little"))
    generator.set_offset(int.from_bytes(key[8:], "little") // 8 * 4)
    return _with_tail(like, count, generator)


def _with_tail(like: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Normal numbers in float64, whatever is asked for.

    CUDA's float32 normals come from 32 random bits and never exceed r = 6.76. A user shifts that
    edge, over d coordinates by up to sqrt(d) / sigma in all, and a number beyond it gives the user
    away: with probability sqrt(d) / sigma * phi(r) a step, 1.5e-6 for d = 10^9 and sigma = 1, more
    than many a delta. From 53 bits the edge is at r = 8.65, and this is 7e-13.
    """
    wide = torch.empty(count, dtype=torch.float64, device=like.device)
    return wide.normal_(generator=generator)
