"""Causal attention within joined records, in place of the model's own.

Joined records lie one after the other in rows, and may reach from one row into the next
(`batches/joined_records`). Hugging Face models take another attention by name, and hand it a mask
of four dimensions untouched. Here that "mask" is the layout (`losses.record_layout`): the position
of each token in its record, and how many tokens of the record follow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from userdp.clipping.execute.models import pretrained
from userdp.errors import InputError

RECORD_ATTENTION = "userdp_records"
# What the CUDA kernels compute in.
KERNEL_DTYPES = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def attention_named(model: nn.Module, name: str) -> Iterator[None]:
    """The attention of this name in all layers inside the `with` block."""
    inner = pretrained(model)
    assert inner is not None
    before: Any = inner.config._attn_implementation
    inner.set_attn_implementation(name)
    try:
        yield
    finally:
        inner.set_attn_implementation(before)


def attention_within_records(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """(rows, length, heads, width), as Hugging Face's attention functions return it."""
    if value.shape[-1] != query.shape[-1]:
        # The kernels take one width. The trial of `joined_records` sees this, on every device.
        raise InputError("joined records need keys and values of the same width.")
    position, left = (part.contiguous() for part in attention_mask[:, 0].unbind(-1))
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if not (query.is_cuda or torch.compiler.is_compiling()):
        return one_by_one(query, key, value, position, left, scale), None
    query, key, value = (_with_adjacent_values(t) for t in (query, key, value))
    out, _sums = record_attention(query, key, value, position, left, scale)
    return out, None


AttentionInterface.register(RECORD_ATTENTION, attention_within_records)


def _with_adjacent_values(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _Apart:
    """Moves tokens between rows that records share and rows of their own."""

    def __init__(self, position: Tensor, left: Tensor) -> None:
        self._shape = position.shape
        starts = ((position == 0) & (left >= 0)).flatten().nonzero().flatten()
        lengths = left.flatten()[starts].long() + 1
        column = torch.arange(int(lengths.max()) if len(lengths) else 1, device=position.device)
        # A column behind the record's end reads the record's own last token. Causal queries before
        # it do not see it, but zero times a number that is not finite is not zero: another user's
        # token there would reach this one.
        place = starts[:, None] + torch.minimum(column, lengths[:, None] - 1)
        # A survey looks at single rows, in which a record may have no end.
        self._place = place.clamp(max=position.numel() - 1)
        self._inside = column < lengths[:, None]

    @property
    def inside(self) -> Tensor:
        """Which columns belong to a record: (records, 1, longest, 1)."""
        return self._inside[:, None, :, None]

    def apart(self, tensor: Tensor, heads: int) -> Tensor:
        """(records, heads, longest, width) from (rows, heads, length, width)."""
        line = tensor.transpose(1, 2).flatten(0, 1)
        if tensor.shape[1] != heads:
            line = line.repeat_interleave(heads // tensor.shape[1], 1)
        return line[self._place].transpose(1, 2)

    def together(self, tensor: Tensor) -> Tensor:
        """(rows, length, heads, width) from (records, heads, longest, width); padding is zero."""
        line = tensor.new_zeros(self._shape.numel(), tensor.shape[1], tensor.shape[3])
        own = tensor.transpose(1, 2)[self._inside]
        return line.index_put((self._place[self._inside],), own).unflatten(0, self._shape)


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, left: Tensor, scale: float
) -> Tensor:
    """The same in plain torch: each record is moved into a row of its own, and back."""
    move = _Apart(position, left)
    q_, k_, v_ = (move.apart(tensor, q.shape[1]) for tensor in (q, k, v))
    return move.together(F.scaled_dot_product_attention(q_, k_, v_, is_causal=True, scale=scale))


def gradients_one_by_one(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, position: Tensor, left: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `one_by_one`, each (rows, length, heads, width)."""
    move, heads = _Apart(position, left), q.shape[1]
    q_, k_, v_, d_out_ = (move.apart(t, heads) for t in (q, k, v, d_out.transpose(1, 2)))
    length = q_.shape[2]
    unseen = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    weights = (q_ @ k_.mT * scale).masked_fill(unseen, -torch.inf).softmax(-1)
    # Columns behind a record's end have no gradient of their own.
    d_out_ = d_out_ * move.inside
    dweights = d_out_ @ v_.mT
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True)) * scale
    dq, dk, dv = (move.together(t) for t in (dscores @ k_, dscores.mT @ q_, weights.mT @ d_out_))
    groups = (k.shape[1], heads // k.shape[1])
    return dq, dk.unflatten(2, groups).sum(3), dv.unflatten(2, groups).sum(3)


@torch.library.custom_op(
    "userdp::record_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor position, Tensor left, float scale) "
    "-> (Tensor, Tensor)",
)
def record_attention(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, left: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """`one_by_one` for compiled code, by a kernel if there is one; also the kernel's sums."""
    if not _has_kernel(q):
        out = one_by_one(q, k, v, position, left, scale).contiguous()
        return out, q.new_empty(q.shape[1], position.numel(), dtype=torch.float32)
    from userdp.clipping.kernels import record_attention as kernels

    return kernels.forward(q, k, v, position, scale)


def _has_kernel(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in KERNEL_DTYPES


@record_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, left: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    rows, heads, length, width = q.shape
    sums = q.new_empty(heads, rows * length, dtype=torch.float32)
    return q.new_empty(rows, length, heads, width), sums


@torch.library.custom_op(
    "userdp::record_attention_backward",
    mutates_args=(),
    schema="(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor position, Tensor left, Tensor out, "
    "Tensor sums, float scale) -> (Tensor, Tensor, Tensor)",
)
def _record_attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, position: Tensor, left: Tensor, out: Tensor,
    sums: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if not _has_kernel(q):
        return gradients_one_by_one(d_out, q, k, v, position, left, scale)
    from userdp.clipping.kernels import record_attention as kernels

    return kernels.backward(d_out.contiguous(), q, k, v, position, left, out, sums, scale)


@_record_attention_backward.register_fake
def _(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, position: Tensor, left: Tensor, out: Tensor,
    sums: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    first, second, third = (
        t.new_empty(t.shape[0], t.shape[2], t.shape[1], t.shape[3]) for t in (q, k, v)
    )
    return first, second, third


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.scale = scale
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, d_out: Tensor, dsums: Any) -> tuple[Tensor | None, ...]:
    gradients = _record_attention_backward(d_out, *ctx.saved_tensors, ctx.scale)
    return *(gradient.transpose(1, 2) for gradient in gradients), None, None, None


record_attention.register_autograd(_differentiate, setup_context=_keep)
