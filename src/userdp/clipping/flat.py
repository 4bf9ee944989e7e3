"""One contiguous buffer for all parameters, so that noise and sums are one operation each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from userdp.updates import wide_dtype

# Every parameter starts on such a boundary, as vector loads and stores want it.
_ALIGNMENT = 4


class FlatBuffer:
    """`values` (float32 at least) and, for every parameter, a `views` of its shape."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        starts = [0]
        for parameter in parameters:
            starts.append(starts[-1] + -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT)
        first = parameters[0]
        self.values = torch.zeros(starts[-1], dtype=wide_dtype(first.dtype), device=first.device)
        self.views = [
            self.values[start : start + parameter.numel()].view(parameter.shape)
            for start, parameter in zip(starts, parameters, strict=False)
        ]

    def zero_(self) -> None:
        """Start over."""
        self.values.zero_()
