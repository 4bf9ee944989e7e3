"""The clipped sum of a cohort, in one contiguous buffer for all parameters.

Sums and noise then need not go from tensor to tensor.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from userdp.losses import wide_dtype

# Every parameter starts on such a boundary, as vector loads and stores want it.
_ALIGNMENT = 4


class FlatBuffer:
    """`values` (float32 at least) and, for every parameter, a `views` of its shape.

    `roomy` views have the rows more that `spare_rows` asks for, by parameter: products of a padded
    head are added there as they come. What lies in them, and in gaps between parameters, is
    nobody's, and may be anything.
    """

    def __init__(
        self, parameters: Sequence[Tensor], spare_rows: Mapping[Tensor, int] | None = None
    ) -> None:
        rows = [
            len(parameter) + (spare_rows or {}).get(parameter, 0) if parameter.dim() else 1
            for parameter in parameters
        ]
        shapes = [
            (count, *parameter.shape[1:]) if parameter.dim() else ()
            for count, parameter in zip(rows, parameters, strict=True)
        ]
        starts = [0]
        for shape in shapes:
            starts.append(starts[-1] + -(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT)
        first = parameters[0]
        self.values = torch.zeros(starts[-1], dtype=wide_dtype(first.dtype), device=first.device)
        self.roomy = [
            self.values[start : start + math.prod(shape)].view(shape)
            for start, shape in zip(starts, shapes, strict=False)
        ]
        self.views = [
            view[: len(parameter)] if parameter.dim() else view
            for view, parameter in zip(self.roomy, parameters, strict=True)
        ]

    def zero_(self) -> None:
        """All values to zero."""
        self.values.zero_()


class HalfAddedError(RuntimeError):
    """A sum was left with part of a batch in it: adding these users again would count them twice.

    By then every gradient is computed, so it is not one user's data that fails.
    """


@contextlib.contextmanager
def adding() -> Iterator[None]:
    """Whatever fails inside leaves the sum half added."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise HalfAddedError("adding a batch to the sum failed: the step is not taken.") from error


@dataclass(frozen=True, kw_only=True)
class ClippedSum:
    """A cohort's clipped updates added up; how many they were, and how many were not clipped.

    A group without a record is not counted: its user moves no number by being there.
    Secret until noised.
    """

    total: FlatBuffer
    num_within: Tensor
    num_updates: int
