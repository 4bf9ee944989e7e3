"""How large a batch may be: enough to fill the device, small enough to fit. Public numbers only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Padded tokens in one backward pass.
CUDA_TOKENS = 16_384
CPU_TOKENS = 2_048
# Logits of the word LSTM in one backward pass on the CPU. Memory for more is not kept for the next
# pass, and to get it anew takes longer than the products.
CPU_LOGITS = 1 << 22
# Memory for stored per-user gradients in one backward pass: bytes on the CPU, a share on CUDA.
CPU_STORED_BYTES = 1 << 29
CUDA_STORED_SHARE = 0.3


def usual_tokens(device: torch.device, words: int = 0) -> int:
    """Padded tokens in one backward pass, if nobody says how many.

    `words` is the size of a word LSTM's dictionary, 0 for other models.
    """
    if device.type == "cuda":
        return CUDA_TOKENS
    return max(1, min(CPU_TOKENS, CPU_LOGITS // words)) if words else CPU_TOKENS


def stored_users(parameters: Sequence[Tensor], product_dtype: torch.dtype) -> int:
    """How many users' stored gradients fit into the memory set aside for them."""
    count, device = sum(p.numel() for p in parameters), parameters[0].device
    if device.type != "cuda":
        return max(1, CPU_STORED_BYTES // (count * parameters[0].element_size()))
    _, memory = torch.cuda.mem_get_info(device)
    return max(2, int(CUDA_STORED_SHARE * memory) // (count * product_dtype.itemsize))
