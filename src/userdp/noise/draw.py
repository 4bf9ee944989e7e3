"""Gaussian noise on tensors, from a run's secret."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from userdp.noise.secret import RunSecret

# As many new numbers as a tensor has.
Draw = Callable[[Tensor], Tensor]

PURPOSE = "noise"
NUMBER_PURPOSE = "noise on a number"
# Numbers that are drawn at a time: as much noise as there are weights need not be held, and what is
# drawn is still in a GPU's cache when it is added.
PIECE = 2**23


def add_gaussian_(values: Tensor, *, noise_stddev: float, secret: RunSecret, step: int) -> None:
    """Add N(0, noise_stddev^2) to every number, in place and in the tensor's own (wide) dtype.

    A step has one call and one stream: no two coordinates share a draw.
    """
    if noise_stddev == 0:
        return
    make_draw = _cuda_normals if values.device.type == "cuda" else _cpu_normals
    draw = make_draw(secret, step, values.device)
    for piece in values.view(-1).split(PIECE):
        piece.add_(draw(piece), alpha=noise_stddev)


def noisy_number(value: float, *, noise_stddev: float, secret: RunSecret, step: int) -> float:
    """One number plus N(0, noise_stddev^2), from a stream of its own."""
    return value + noise_stddev * float(secret.rng(NUMBER_PURPOSE, step).standard_normal())


def _cpu_normals(secret: RunSecret, step: int, device: torch.device) -> Draw:
    # numpy's Philox takes a 128-bit key. torch's own CPU generator uses 32 bits of its seed, few
    # enough to try them all.
    rng = secret.rng(PURPOSE, step)

    def draw(like: Tensor) -> Tensor:
        dtype = "f8" if like.dtype == torch.float64 else "f4"
        return torch.from_numpy(rng.standard_normal(len(like), dtype=dtype)).to(device)

    return draw


def _cuda_normals(secret: RunSecret, step: int, device: torch.device) -> Draw:
    # torch's CUDA generator is Philox with a 64-bit seed and a 64-bit offset that must be a
    # multiple of four; both come from the stream key.
    key = secret.stream_key(PURPOSE, step)
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(key[:8], "little"))
    generator.set_offset(int.from_bytes(key[8:], "little") // 8 * 4)
    return partial(_with_tail, generator=generator)


def _with_tail(like: Tensor, *, generator: torch.Generator) -> Tensor:
    """Normal numbers in float64, whatever is asked for.

    CUDA's float32 normals come from 32 random bits and never exceed r = 6.76. A user shifts that
    edge, over d coordinates by up to sqrt(d) / sigma in all, and a number beyond it gives the user
    away: with probability sqrt(d) / sigma * phi(r) a step, 1.5e-6 for d = 10^9 and sigma = 1, more
    than many a delta. From 53 bits the edge is at r = 8.65, and this is 7e-13.
    """
    return torch.empty_like(like, dtype=torch.float64).normal_(generator=generator)
