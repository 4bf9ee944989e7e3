"""Tables of addresses: what lets one kernel launch read hundreds of tensors.

The host sends the tensors' addresses to the device in a table. Sizes are counted in units of a few
values, so that the compiler knows what is aligned.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


class Addresses:
    """A table of numbers that the device reads: tensors' addresses, sizes and so on.

    A captured graph reads the table's copy on the host again at every replay. So that copy is kept
    here, and is not written to after the capture.
    """

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._host = torch.zeros(rows, columns, dtype=torch.int64, pin_memory=on_cuda)
        self._device = torch.zeros(rows, columns, dtype=torch.int64, device=device)

    def send(self, *rows: Sequence[int]) -> tuple[Tensor, ...]:
        """The rows on the device."""
        self._host.copy_(torch.tensor(rows))
        capturing = self._device.is_cuda and torch.cuda.is_current_stream_capturing()
        self._device.copy_(self._host, non_blocking=capturing)
        return self._device.unbind(0)


def dtype_name(tensor: Tensor) -> str:
    """The dtype's name, as the kernels take it."""
    return str(tensor.dtype).removeprefix("torch.")


def check_aligned(tensors: Sequence[Tensor]) -> None:
    """Assert that kernels can read the tensors, in vectors of 16 bytes."""
    assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors)


@triton.jit
def tokens_of(starts, user, row_length):
    """A user's first token in the batch, and how many it has."""
    first = tl.load(starts + user).to(tl.int64)
    last = tl.load(starts + user + 1).to(tl.int64)
    return first * row_length, ((last - first) * row_length).to(tl.int32)


@triton.jit
def typed(address, DTYPE: tl.constexpr):
    """A pointer from an address in a table."""
    if DTYPE == "bfloat16":
        pointer = address.to(tl.pointer_type(tl.bfloat16))
    elif DTYPE == "float16":
        pointer = address.to(tl.pointer_type(tl.float16))
    else:
        pointer = address.to(tl.pointer_type(tl.float32))
    return tl.multiple_of(pointer, 16)
