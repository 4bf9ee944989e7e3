"""Correlated noise on tensors: C^-1 z for one step at a time, by position.

z are the unit normal numbers that independent noise would have had at each step, drawn by position
from the same streams. So any part of the buffer can be computed alone.

What is stored between steps is the noise that was added, bit for bit, and sums are taken in
float64. This matters: were the stored noise rounded further, C would meet other numbers than those
that were released, and one user could change how they round. With d coordinates of noise s and
steps of size u between stored numbers, that adds up to about u sqrt(d) to the squared sensitivity.
In bfloat16 (u = s / 256) and with a hundred million weights that is 40 s: the price would be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from userdp.noise.draw import has_kernels, normal_pieces
from userdp.streams import Streams


def advance_(
    values: Tensor,
    past: Tensor,
    row: Sequence[float],
    *,
    offset: int,
    size: int,
    stddev: float,
    step: int,
    streams: Streams,
) -> None:
    """Add stddev times w_t = (z_t - sum_j C[t, t-j] w_(t-j)) / C[t, t], and remember w_t.

    `row` is C[t, t], C[t, t - 1], ... The vectors `past` are a ring: w_s is in place s mod their
    number, so w_t takes the place of the oldest, which is not needed again.
    """
    flat, kept = values.view(-1), len(past)
    if has_kernels(flat):
        from userdp.noise import banded_kernels

        banded_kernels.advance_(
            flat,
            past,
            row,
            offset=offset,
            stddev=stddev,
            step=step,
            randomness=streams.randomness,
            key=streams.key(step),
        )
        return
    for held, z in normal_pieces(flat, offset=offset, size=size, step=step, streams=streams):
        noise = z.double()
        for back in range(1, len(row)):
            noise.add_(past[(step - back) % kept, held], alpha=-row[back])
        noise /= row[0]
        place = past[step % kept, held]
        place.copy_(noise)
        flat[held].add_(place, alpha=stddev)


def add_from_streams_(
    values: Tensor,
    noising: Sequence[float],
    *,
    offset: int,
    size: int,
    stddev: float,
    step: int,
    streams: Streams,
) -> None:
    """Add stddev times sum_j `noising`[j] z_(t-j), drawing the past z again: nothing is stored."""
    flat = values.view(-1)
    if has_kernels(flat):
        from userdp.noise import banded_kernels

        # Steps before the first one count as zero, so that one kernel serves all steps.
        banded_kernels.add_redrawn_(
            flat,
            [number if back <= step else 0.0 for back, number in enumerate(noising)],
            [streams.key(max(step - back, 0)) for back in range(len(noising))],
            offset=offset,
            stddev=stddev,
            randomness=streams.randomness,
        )
        return
    drawn = [
        normal_pieces(flat, offset=offset, size=size, step=step - back, streams=streams)
        for back in range(min(len(noising), step + 1))
    ]
    for pieces in zip(*drawn, strict=True):
        held = pieces[0][0]
        noise = torch.zeros_like(flat[held], dtype=torch.float64)
        for coefficient, (_, z) in zip(noising, pieces, strict=False):
            noise.add_(z, alpha=coefficient)
        flat[held].add_(noise.to(flat.dtype), alpha=stddev)


def advance_buffers_(
    values: Tensor,
    buffers: Tensor,
    *,
    diagonal: float,
    decays: Sequence[float],
    scales: Sequence[float],
    offset: int,
    size: int,
    stddev: float,
    step: int,
    streams: Streams,
) -> None:
    """Add stddev times w_t = z_t / c_0 - sum_i scale_i s_i, and let every s_i = decay_i s_i + w_t.

    The buffers are float64, because they stand for all past noise and cannot be exactly what was
    added.
    """
    flat = values.view(-1)
    for held, z in normal_pieces(flat, offset=offset, size=size, step=step, streams=streams):
        noise = z.double() / diagonal
        for scale, buffer in zip(scales, buffers, strict=True):
            noise.add_(buffer[held], alpha=-scale)
        added = noise.to(flat.dtype)
        for decay, buffer in zip(decays, buffers, strict=True):
            buffer[held].mul_(decay).add_(added)
        flat[held].add_(added, alpha=stddev)
