"""The clipped sum of a cohort, in one contiguous buffer for all parameters.

So sums and noise need no loop over tensors.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from userdp.losses import wide_dtype

# Every parameter starts at a multiple of this many values, as vector loads and stores need.
_ALIGNMENT = 4


class FlatBuffer:
    """`values` (float32 at least), and for every parameter a view of its shape in `views`.

    A view in `roomy` has extra rows, as many as `spare_rows` gives for its parameter. Products of a
    padded head are added there as they come. The extra rows, and the gaps between parameters,
    belong to no parameter and may hold anything. The values lie where the first parameter does,
    unless `on` names another device.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        spare_rows: Mapping[Tensor, int] | None = None,
        *,
        on: torch.device | str | None = None,
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
        device = first.device if on is None else on
        self.values = torch.zeros(starts[-1], dtype=wide_dtype(first.dtype), device=device)
        self.roomy = [
            self.values[start : start + math.prod(shape)].view(shape)
            for start, shape in zip(starts, shapes, strict=False)
        ]
        self.views = [
            view[: len(parameter)] if parameter.dim() else view
            for view, parameter in zip(self.roomy, parameters, strict=True)
        ]

    def zero_(self) -> None:
        """Set all values to zero."""
        self.values.zero_()


class HalfAddedError(RuntimeError):
    """A sum holds only part of a batch: adding these users again would count them twice.

    By then every gradient is computed, so the failure does not come from one user's data.
    """


@contextlib.contextmanager
def adding() -> Iterator[None]:
    """Raise `HalfAddedError` if anything inside fails. Lack of memory is raised as it is."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise HalfAddedError("adding a batch to the sum failed: the step is not taken.") from error


@dataclass(frozen=True, kw_only=True)
class Apart:
    """Clipped updates that are not added up yet, one a row. Secret.

    `places` says which group of this rank each is of. `of_all` makes the sum, from the updates of
    all ranks in the cohort's order and the number of all groups.
    """

    users_UP: Tensor
    places: tuple[int, ...]
    of_all: Callable[[Tensor, int], ClippedSum]


@dataclass(frozen=True, kw_only=True)
class ClippedSum:
    """The sum of a cohort's clipped updates, their number, and how many were within the clip norm.

    A group without a record is not counted: its user changes no number by being there. Secret until
    noise is added. `concentration` is the score of a halting test, where there is one. `weight` is
    the total weight of the updates, where they are weighted; otherwise each has the weight 1.
    `apart` are the updates themselves, where a sum needs those of all ranks first.
    """

    total: FlatBuffer
    num_within: Tensor
    num_updates: int
    concentration: float | None = None
    weight: float | None = None
    apart: Apart | None = None

    @property
    def total_weight(self) -> float:
        """The weight of all updates together."""
        return float(self.num_updates) if self.weight is None else self.weight

    @property
    def is_zero(self) -> bool:
        """Whether no group gave anything."""
        if self.apart is not None:
            return not bool(self.apart.users_UP.any())
        return not any(bool(view.any()) for view in self.total.views)
