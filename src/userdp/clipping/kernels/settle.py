"""The CUDA kernel that sets pairs right before their sum: scaled once more, or set to zero."""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from userdp.clipping.kernels.tables import Addresses, check_aligned, dtype_name, typed

_BLOCK = 4096


@triton.jit
def _settle_kernel(
    addresses,
    given_addresses,
    sizes,
    factor_rows,
    factors_pointer,
    again,
    num_users,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    tensor = tl.program_id(0)
    user = tl.program_id(1).to(tl.int64)
    factor = tl.load(factors_pointer + tl.load(factor_rows + tensor) * num_users + user)
    address, given = tl.load(addresses + tensor), tl.load(given_addresses + tensor)
    # Almost always there is nothing to do.
    if (factor == 0.0) | ((tl.load(again + user) != 0) & (address != given)):
        size = tl.load(sizes + tensor) * UNIT
        values, source = typed(address, DTYPE) + user * size, typed(given, DTYPE) + user * size
        offsets = tl.arange(0, BLOCK)
        for _ in range(tl.cdiv(size, BLOCK)):
            value = tl.load(source + offsets, offsets < size, 0.0)
            scaled = tl.where(factor == 0.0, 0.0, value.to(tl.float32) * factor)
            tl.store(values + offsets, scaled.to(value.dtype), mask=offsets < size)
            offsets += BLOCK


class Settler:
    """Scales the tensors of some users again or sets them to zero, in place, in one launch.

    It takes `num_tensors` tensors of one dtype, each with the same number of users.
    """

    def __init__(self, num_tensors: int, device: torch.device) -> None:
        self._table = Addresses(4, num_tensors, device)

    def __call__(
        self,
        tensors: Sequence[tuple[Tensor, Tensor]],
        factor_rows: Sequence[int],
        factors: Tensor,
        again: Tensor,
    ) -> None:
        """Each of `tensors` is (tensor, original); one that was not scaled is its own original.

        Tensor i's factors are `factors[factor_rows[i]]`. For users in `again` a scaled tensor
        becomes factor * original. Where the factor is zero, any tensor becomes zero.
        """
        check_aligned([tensor for pair in tensors for tensor in pair])
        sizes = [tensor[0].numel() for tensor, _ in tensors]
        unit = math.gcd(8, *sizes)
        rows = self._table.send(
            [tensor.data_ptr() for tensor, _ in tensors],
            [given.data_ptr() for _, given in tensors],
            [size // unit for size in sizes],
            factor_rows,
        )
        first, _ = tensors[0]
        _settle_kernel[(len(tensors), len(first))](
            *rows,
            factors.contiguous(),
            again.to(torch.int32),
            len(first),
            BLOCK=_BLOCK,
            UNIT=unit,
            DTYPE=dtype_name(first),
        )
