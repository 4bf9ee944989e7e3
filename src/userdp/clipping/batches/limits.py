"""How large a batch may be: enough to fill the device, small enough to fit. Public numbers only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Padded tokens in one backward pass.
CUDA_TOKENS = 16_384
CPU_TOKENS = 2_048
# Memory for stored per-user gradients in one backward pass: bytes on the CPU, a share on CUDA.
CPU_STORED_BYTES = 1 << 29
CUDA_STORED_SHARE = 0.3


def usual_tokens(device: torch.device) -> int:
    """Padded tokens in one backward pass, if nobody says how many."""
    return CUDA_TOKENS if device.type == "cuda" else CPU_TOKENS


def stored_users(parameters: Sequence[Tensor], product_dtype: torch.dtype) -> int:
    """How many users' stored gradients fit into the memory set aside for them."""
    count, device = sum(p.numel() for p in parameters), parameters[0].device
    if device.type != "cuda":
        return max(1, CPU_STORED_BYTES // (count * parameters[0].element_size()))
    _, memory = torch.cuda.mem_get_info(device)
    return max(2, int(CUDA_STORED_SHARE * memory) // (count * product_dtype.itemsize))
