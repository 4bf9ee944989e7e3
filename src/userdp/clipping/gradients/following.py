"""Where attention can follow records from one row into the next (`batches/joined_records`)."""

from __future__ import annotations

import torch
from torch import nn

from userdp.clipping.execute.record_attention import KERNEL_DTYPES
from userdp.clipping.gradients.any_layer import AnyLayer
from userdp.clipping.gradients.survey import find_layers
from userdp.errors import InputError


def can_follow_records(
    model: nn.Module, dtype: torch.dtype, *, captured: bool, is_asked: bool
) -> bool:
    """Whether attention across rows can run. Raises, with the reason, if it `is_asked` for."""
    why = _why_not(model, dtype, captured)
    if is_asked and why:
        raise InputError(f"join_records: {why}")
    return not why


def _why_not(model: nn.Module, dtype: torch.dtype, captured: bool) -> str:
    if captured and dtype not in KERNEL_DTYPES:
        # Outside of its kernel it cannot be captured.
        return (
            "on CUDA it needs products in half precision. Give compute_dtype bfloat16, or "
            "compile_blocks=False."
        )
    blocks = (one for one in find_layers(model) if one.rule is AnyLayer)
    block = next((one.name for one in blocks if any(one.module.children())), None)
    if block is None:
        return ""
    # A record gets a row of its own there, and `torch.vmap` cannot make as many as there are.
    return (
        f"this model does not keep records apart in one row: its block {block!r} has weights of "
        "its own beside its layers, so that users run in it one by one. Leave join_records out."
    )
