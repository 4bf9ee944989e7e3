"""Products of large matrices on a processor, by the faster of the libraries that torch brings.

torch multiplies float32 matrices by MKL, which is slow on processors of other makers than its own:
on an AMD EPYC it reaches 115 GFLOPS on one core where oneDNN, which torch brings as well, reaches
250. torch offers oneDNN's product to its own compiler only; where a version of torch does not offer
it, the usual product is taken. The choice depends on the build and the shapes alone, so a step that
is repeated rounds as it did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def product(left_NK: Tensor, right_MK: Tensor) -> Tensor:
    """left right^T, (N, M). Each operand, or its transpose, must be contiguous.

    Other operands are right, too, but oneDNN would take a thousand times as long for them.
    """
    if left_NK.device.type == "cpu" and _fits(left_NK) and _fits(right_MK):
        linear = _onednn()
        if linear is not None:
            return linear(left_NK, right_MK, None, "none", [], "")
    return left_NK @ right_MK.mT


def _fits(tensor: Tensor) -> bool:
    """Whether oneDNN has a fast product for it. It refuses matrices without a number."""
    whole = tensor.is_contiguous() or tensor.mT.is_contiguous()
    return tensor.dtype == torch.float32 and tensor.numel() > 0 and whole


def _onednn() -> Callable[..., Any] | None:
    """oneDNN's product of torch; None if it is not there or switched off."""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:  # pyright: ignore
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)
