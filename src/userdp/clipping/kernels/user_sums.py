"""Every user's sum over its tokens: its stored gradient of a bias or of a norm's weight.

The users' tokens lie one after the other, and user u's end at `ends[u]`. Sums by row would have to
be read again, once for the norms and once for the clipped sum, and where rows are short there are
many of them.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from userdp.losses import wide_dtype


@torch.library.custom_op(
    "userdp::user_sums",
    mutates_args=(),
    schema="(Tensor values, Tensor? others, Tensor ends) -> (Tensor, Tensor)",
)
def user_sums(values: Tensor, others: Tensor | None, ends: Tensor) -> tuple[Tensor, Tensor]:
    """(users, columns) sums of (tokens, columns), and of values * others where these are given.

    In float32 at least. A user without tokens has zeros. Without `others` the second has no row.
    Tokens behind the last user's are left out.
    """
    wide = wide_dtype(values.dtype)
    if values.is_cuda:
        return _kernel().user_sums(values, others, ends, wide)
    counts = ends.diff(prepend=ends.new_zeros(1))
    owner = torch.repeat_interleave(torch.arange(len(ends)), counts)
    values = values[: len(owner)]
    others = None if others is None else others[: len(owner)]
    sums = torch.zeros(len(ends), values.shape[1], dtype=wide)
    found = sums.index_add(0, owner, values.to(wide))
    if others is None:
        return found, sums[:0]
    return found, sums.index_add(0, owner, values.to(wide) * others.to(wide))


@user_sums.register_fake
def _(values: Tensor, others: Tensor | None, ends: Tensor) -> tuple[Tensor, Tensor]:
    shape, wide = (ends.shape[0], values.shape[1]), wide_dtype(values.dtype)
    second = (0, values.shape[1]) if others is None else shape
    return values.new_empty(shape, dtype=wide), values.new_empty(second, dtype=wide)


def _kernel() -> Any:
    return importlib.import_module("userdp.clipping.kernels.user_sums_kernel")
