"""CUDA kernels for stored gradients: all norms in one launch, all weighted sums in another."""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from userdp.clipping.kernels import reference
from userdp.clipping.kernels.tables import Addresses, check_aligned, dtype_name, typed

_BLOCK = 1024
_BLOCKS_A_NORM = 16


@triton.jit
def _stored_norms_kernel(
    addresses,
    tensor_of_block,
    start_of_block,
    sizes,
    starts,
    out_pointer,
    num_users,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    UNIT: tl.constexpr,
    DTYPE: tl.constexpr,
    BY_ROW: tl.constexpr,
    HAS_GAPS: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    block = tl.program_id(0)
    user = tl.program_id(1).to(tl.int64)
    tensor = tl.load(tensor_of_block + block)
    start = tl.load(start_of_block + block) * BLOCK
    size = tl.load(sizes + tensor) * UNIT
    values = typed(tl.load(addresses + tensor), DTYPE)
    total = tl.zeros((BLOCK,), tl.float32)
    if BY_ROW:
        # A user's rows add up before they are squared: `reference.ragged_squared_norms`.
        first, last = tl.load(starts + user), tl.load(starts + user + 1)
        raised = (last - first).to(tl.float32) * ROUNDING
        for i in range(BLOCKS):
            offsets = start + i * BLOCK + tl.arange(0, BLOCK)
            summed = tl.zeros((BLOCK,), tl.float32)
            squares = tl.zeros((BLOCK,), tl.float32)
            place = values + first.to(tl.int64) * size + offsets
            for _ in range(first, last):
                value = tl.load(place, offsets < size, 0.0).to(tl.float32)
                summed += value
                squares += value * value
                place += size
            total += summed * summed + raised * squares
    else:
        values += user * size
        if HAS_GAPS:
            # A place without rows is not read.
            size = tl.where(tl.load(starts + user) == tl.load(starts + user + 1), 0, size)
        for i in range(BLOCKS):
            offsets = start + i * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(values + offsets, offsets < size, 0.0).to(tl.float32)
            total += value * value
    tl.store(out_pointer + block * num_users + user, tl.sum(total))


@triton.jit
def _stored_sums_kernel(
    addresses,
    out_addresses,
    out_sizes,
    tensor_of_block,
    start_of_block,
    sizes,
    groups,
    factors_pointer,
    num_used,
    num_users,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_GAPS: tl.constexpr,
):
    block = tl.program_id(0)
    tensor = tl.load(tensor_of_block + block)
    offsets = tl.load(start_of_block + block) * BLOCK + tl.arange(0, BLOCK)
    size = tl.load(sizes + tensor) * UNIT
    inside = offsets < size
    place = typed(tl.load(addresses + tensor), DTYPE) + offsets
    factors = factors_pointer + tl.load(groups + tensor) * num_users
    total = tl.zeros((BLOCK,), tl.float32)
    last = num_users
    if HAS_GAPS:
        last = tl.load(num_used)
    for user in range(last):
        factor = tl.load(factors + user)
        value = tl.load(place, inside, 0.0).to(tl.float32)
        # With a factor of zero even a value that is not finite adds zero.
        total += tl.where(factor == 0.0, 0.0, factor * value)
        place += size
    out = typed(tl.load(out_addresses + tensor), "float32")
    kept = offsets < tl.load(out_sizes + tensor)
    total += tl.load(out + offsets, kept, 0.0)
    tl.store(out + offsets, total, kept)


class StoredTable:
    """Norms and weighted sums of a list of (users, ...) tensors of fixed shapes."""

    def __init__(self, gradients: Sequence[Tensor], groups: Sequence[int]) -> None:
        device = gradients[0].device
        self._count = len(gradients[0])
        sizes = [gradient[0].numel() for gradient in gradients]
        self._unit = math.gcd(8, *sizes)
        self._sizes = torch.tensor([size // self._unit for size in sizes], device=device)
        self._groups = torch.tensor(groups, device=device)
        self._norm_blocks = _blocks(sizes, _BLOCKS_A_NORM, device)
        self._sum_blocks = _blocks(sizes, 1, device)
        self.block_groups = [groups[tensor] for tensor in self._norm_blocks[0].tolist()]
        self._for_norms = Addresses(1, len(sizes), device)
        self._for_sums = Addresses(3, len(sizes), device)

    def squared_norms(
        self, gradients: Sequence[Tensor], starts: Tensor | None = None, *, by_row: bool = True
    ) -> Tensor:
        """Partial squared norms (blocks, users); `block_groups` gives the group of each block.

        `starts` says where users' rows begin in a ragged batch; a place without rows is not read.
        There tensors count rows if `by_row`, and a user's norm is that of the sum of its rows, from
        above; otherwise they count users.
        """
        check_aligned(gradients)
        (addresses,) = self._for_norms.send([g.data_ptr() for g in gradients])
        tensors, firsts = self._norm_blocks
        users = self._count if starts is None else len(starts) - 1
        out = torch.empty(len(tensors), users, dtype=torch.float32, device=tensors.device)
        _stored_norms_kernel[(len(tensors), users)](
            addresses,
            tensors,
            firsts,
            self._sizes,
            self._sizes if starts is None else starts,
            out,
            users,
            BLOCK=_BLOCK,
            BLOCKS=_BLOCKS_A_NORM,
            UNIT=self._unit,
            DTYPE=dtype_name(gradients[0]),
            BY_ROW=starts is not None and by_row,
            HAS_GAPS=starts is not None,
            ROUNDING=reference.TORCH_GRAM_ROUNDINGS * torch.finfo(torch.float32).eps,
        )
        return out

    def add_weighted_sums(
        self,
        gradients: Sequence[Tensor],
        totals: Sequence[Tensor],
        factors: Tensor,
        num_used: Tensor | None = None,
    ) -> None:
        """totals[i] += sum_u factors[group_i, u] gradients[i][u].

        A total may have fewer rows than its gradients. With `num_used`, only that many users are
        read.
        """
        check_aligned([*gradients, *totals])
        addresses = self._for_sums.send(
            [g.data_ptr() for g in gradients],
            [total.data_ptr() for total in totals],
            [total.numel() for total in totals],
        )
        tensors, starts = self._sum_blocks
        _stored_sums_kernel[(len(tensors),)](
            *addresses,
            tensors,
            starts,
            self._sizes,
            self._groups,
            factors.contiguous(),
            self._sizes if num_used is None else num_used,
            self._count,
            BLOCK=_BLOCK,
            UNIT=self._unit,
            DTYPE=dtype_name(gradients[0]),
            HAS_GAPS=num_used is not None,
        )


def _blocks(sizes: Sequence[int], step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each program its tensor, and its first block there; a program takes `step` blocks."""
    counts = [-(-size // (_BLOCK * step)) for size in sizes]
    tensors = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(counts))
    starts = torch.cat([torch.arange(count) * step for count in counts])
    return tensors.to(device), starts.to(device)
