"""Normal numbers on tensors, by position, from a run's streams.

Why the tails matter: normal numbers that are computed end at some largest r. A user shifts that
edge, over d coordinates by up to sqrt(d) / sigma in all, and a number beyond it gives the user
away: with probability about sqrt(d) / sigma * phi(r) a step.

| numbers | edge r | probability for d = 10^9, sigma = 1 |
|---|---|---|
| float32 by CUDA's own generator, from 32 bits | 6.76 | 1.5e-6, more than many a delta |
| float32 by numpy: its tail has 24 bits | 8.21 | 3e-11, and few values beyond 7 |
| float64 by numpy, which the CPU uses | 13.7 | 0 |
| float32 by our CUDA kernels, from 64 bits | 9.49 | 4e-16 |

So the CPU draws float64 and rounds it to the buffer's dtype. A GPU runs `kernels` on float32
buffers; for the others its numbers come from the CPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from userdp.streams import Streams

PURPOSE = "noise"
NUMBER_PURPOSE = "noise on a number"
SCORE_PURPOSE = "score of a test"
# What is drawn anew at each step and added to what is released.
PURPOSES_OF_STEPS = frozenset({PURPOSE, NUMBER_PURPOSE, SCORE_PURPOSE})
# The flat buffer is cut into pieces of this many numbers, and on the CPU each has a stream of its
# own. So noise for all weights at once need not be held.
PIECE = 2**23
Drawn = TypeVar("Drawn")


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
    if has_kernels(flat):
        _add_by_kernel(flat, offset, stddev, step, streams)
        return
    for held, noise in normal_pieces(flat, offset=offset, size=size, step=step, streams=streams):
        flat[held].add_(noise, alpha=stddev)


def normal_pieces(
    flat: Tensor, *, offset: int, size: int, step: int, streams: Streams
) -> Iterator[tuple[slice, Tensor]]:
    """Unit normal numbers for `flat`, which is not changed: where they go, and the numbers.

    `flat` are the positions from `offset` on in a buffer of `size` numbers.
    """
    if has_kernels(flat):
        for start in range(0, len(flat), PIECE):
            noise = torch.zeros_like(flat[start : start + PIECE])
            _add_by_kernel(noise, offset + start, 1.0, step, streams)
            yield slice(start, start + len(noise)), noise
        return
    for piece in range(offset // PIECE, -(-(offset + len(flat)) // PIECE)):
        start = piece * PIECE
        # A piece is always drawn whole: a number depends on those that are drawn before it.
        noise = _piece(flat, min(PIECE, size - start), streams, step, piece)
        first, last = max(start, offset), min(start + len(noise), offset + len(flat))
        yield slice(first - offset, last - offset), noise[first - start : last - start]


@contextlib.contextmanager
def pieces_drawn_once() -> Iterator[None]:
    """Inside, a piece is drawn once, though many parts of a buffer lie in it.

    Whoever holds a buffer in parts takes them in their order, so one piece at a time is kept. At
    the end nothing is: all of it is secret.
    """
    global _kept
    _kept = _Kept()
    try:
        yield
    finally:
        _kept = None


class _Kept:
    """The numbers of one piece, by what they were drawn for."""

    def __init__(self) -> None:
        self.piece = -1
        self.numbers: dict[Any, Any] = {}


_kept: _Kept | None = None


def drawn_once(piece: int, key: Any, draw: Callable[[], Drawn]) -> Drawn:
    """What `draw` gives, kept for the next part inside `pieces_drawn_once`. Nobody writes to it."""
    if _kept is None:
        return draw()
    if _kept.piece != piece:
        _kept.piece, _kept.numbers = piece, {}
    if key not in _kept.numbers:
        _kept.numbers[key] = draw()
    return _kept.numbers[key]


def has_kernels(values: Tensor) -> bool:
    """Whether the kernels of `kernels` draw for this tensor: Triton comes with torch for CUDA."""
    on_cuda = values.is_cuda and values.dtype == torch.float32
    return on_cuda and importlib.util.find_spec("triton") is not None


def _add_by_kernel(values: Tensor, offset: int, stddev: float, step: int, streams: Streams) -> None:
    from userdp.noise import kernels

    kernels.add_normal_(
        values,
        offset=offset,
        stddev=stddev,
        randomness=streams.randomness,
        key=streams.key(step),
    )


def noisy_number(value: float, *, noise_stddev: float, streams: Streams, step: int) -> float:
    """One number plus N(0, noise_stddev^2)."""
    return value + noise_stddev * float(streams.rng(step).standard_normal())


def _piece(like: Tensor, count: int, streams: Streams, step: int, piece: int) -> Tensor:
    # numpy's float32 normals end early, so float64 ones are rounded. torch's own CPU generator uses
    # 32 bits of its seed, few enough to try them all.
    kind = np.float64 if like.dtype == torch.float64 else np.float32

    def draw() -> Tensor:
        noise = streams.rng(step, piece).standard_normal(count)
        return torch.from_numpy(noise.astype(kind, copy=False))

    return drawn_once(piece, (streams, step, kind, count), draw).to(like.device)
