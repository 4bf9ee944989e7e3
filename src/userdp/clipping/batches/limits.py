"""How large a batch may be: enough to fill the device, small enough to fit. Public numbers only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from userdp.clipping.execute.models import head_padding, output_layer

# Padded tokens in one backward pass.
CUDA_TOKENS = 16_384
CPU_TOKENS = 2_048
# Logits of the word LSTM in one backward pass on the CPU. Memory for more is not kept for the next
# pass, and to get it anew takes longer than the products.
CPU_LOGITS = 1 << 22
# A captured batch costs 1.6 to 1.9 ms whatever its size (H200, GPT-2 small). A device with room for
# this many times a model's weights runs large batches, which hold most cohorts of 64 short users.
# GPT-2 small needs about 170 times its weights for them, while another shape is captured.
LARGE_TOKENS = 40_960
LEAST_ROOM = 192
# Memory for stored per-user gradients in one backward pass: bytes on the CPU, a share on CUDA.
CPU_STORED_BYTES = 1 << 29
CUDA_STORED_SHARE = 0.3


def usual_tokens(model: nn.Module, device: torch.device, *, captured: bool, words: int = 0) -> int:
    """Padded tokens in one backward pass, if nobody says how many.

    `words` is the size of a word LSTM's dictionary, 0 for other models.
    """
    if device.type != "cuda":
        return max(1, min(CPU_TOKENS, CPU_LOGITS // words)) if words else CPU_TOKENS
    free, _ = torch.cuda.mem_get_info(device)
    return large_or_usual(model, free) if captured else CUDA_TOKENS


def large_or_usual(model: nn.Module, memory: int) -> int:
    """The tokens of a captured batch where this much memory, in bytes, is free on the device."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    width = getattr(output_layer(model), "out_features", 0) + head_padding(model)
    # Kernels count the logits in 32 bits.
    fits = LEAST_ROOM * weights <= memory and LARGE_TOKENS * width < 2**31
    return LARGE_TOKENS if fits else CUDA_TOKENS


def stored_users(
    parameters: Sequence[Tensor], product_dtype: torch.dtype, *, most: int | None = None
) -> int:
    """How many users' stored gradients fit into the memory set aside for them, at most `most`."""
    count, device = sum(p.numel() for p in parameters), parameters[0].device
    if device.type != "cuda":
        fitting = max(1, CPU_STORED_BYTES // (count * parameters[0].element_size()))
    else:
        _, memory = torch.cuda.mem_get_info(device)
        fitting = max(2, int(CUDA_STORED_SHARE * memory) // (count * product_dtype.itemsize))
    return min(fitting, most or fitting)
