"""Gaussian noise on tensors, from a run's secret."""

from __future__ import annotations

import torch
from torch import Tensor

from userdp.noise.secret import RunSecret

PURPOSE = "noise"
NUMBER_PURPOSE = "noise on a number"


def add_gaussian_(values: Tensor, *, noise_stddev: float, secret: RunSecret, step: int) -> None:
    """Add N(0, noise_stddev^2) to every number, in place and in the tensor's own (wide) dtype.

    A step has one call and one stream: no two coordinates share a draw.
    """
    if noise_stddev == 0:
        return
    draw = _cuda_normals if values.device.type == "cuda" else _cpu_normals
    values.add_(draw(values, secret, step), alpha=noise_stddev)


def noisy_number(value: float, *, noise_stddev: float, secret: RunSecret, step: int) -> float:
    """One number plus N(0, noise_stddev^2), from a stream of its own."""
    return value + noise_stddev * float(secret.rng(NUMBER_PURPOSE, step).standard_normal())


def _cpu_normals(like: Tensor, secret: RunSecret, step: int) -> Tensor:
    # numpy's Philox takes a 128-bit key. torch's own CPU generator uses 32 bits of its seed, few
    # enough to try them all.
    dtype = "f8" if like.dtype == torch.float64 else "f4"
    normals = secret.rng(PURPOSE, step).standard_normal(tuple(like.shape), dtype=dtype)
    return torch.from_numpy(normals).to(like.device)


def _cuda_normals(like: Tensor, secret: RunSecret, step: int) -> Tensor:
    # torch's CUDA generator is Philox with a 64-bit seed and a 64-bit offset that must be a
    # multiple of four; both come from the stream key.
    key = secret.stream_key(PURPOSE, step)
    generator = torch.Generator(device=like.device)
    generator.manual_seed(int.from_bytes(key[:8], "little"))
    generator.set_offset(int.from_bytes(key[8:], "little") // 8 * 4)
    return torch.empty_like(like).normal_(generator=generator)
