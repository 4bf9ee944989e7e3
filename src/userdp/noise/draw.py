"""Gaussian noise on tensors, from a run's secret."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from userdp.noise.secret import RunSecret

PURPOSE = "noise"


def add_gaussian(
    tensors: Sequence[Tensor], *, noise_stddev: float, secret: RunSecret, step: int
) -> list[Tensor]:
    """The tensors plus N(0, noise_stddev^2) on every coordinate, in their own (wide) dtype.

    One stream serves all tensors of a step in order, so no two coordinates share a draw.
    """
    if not tensors or noise_stddev == 0:
        return list(tensors)
    draw = _cuda_normals if tensors[0].device.type == "cuda" else _cpu_normals
    normals = draw(tensors, secret, step)
    return [tensor + noise_stddev * normal for tensor, normal in zip(tensors, normals, strict=True)]


def _cpu_normals(tensors: Sequence[Tensor], secret: RunSecret, step: int) -> list[Tensor]:
    # numpy's Philox takes a 128-bit key. torch's own CPU generator uses 32 bits of its seed, few
    # enough to try them all.
    rng = secret.rng(PURPOSE, step)
    return [
        torch.from_numpy(
            rng.standard_normal(
                tuple(tensor.shape), dtype="f8" if tensor.dtype == torch.float64 else "f4"
            )
        ).to(tensor.device)
        for tensor in tensors
    ]


def _cuda_normals(tensors: Sequence[Tensor], secret: RunSecret, step: int) -> list[Tensor]:
    # torch's CUDA generator is Philox with a 64-bit seed and a 64-bit offset that must be a
    # multiple of four; both come from the stream key.
    key = secret.stream_key(PURPOSE, step)
    generator = torch.Generator(device=tensors[0].device)
    generator.manual_seed(int.from_bytes(key[:8], "little"))
    generator.set_offset(int.from_bytes(key[8:], "little") // 8 * 4)
    return [torch.empty_like(tensor).normal_(generator=generator) for tensor in tensors]
