"""The loss of every token without the logits of all tokens: memory does not grow with vocabulary.

The logits of N tokens and V words take N V values, and as many again for their gradient. Here the
head returns its input, and the loss multiplies with the head's weight piece by piece:

- A frozen head, or one that is not asked for its gradient: some tokens at a time. The gradient of
  the head's input is computed with the loss, for a weight of 1, and scaled in the backward pass.
- A trained head: the sums over words are kept from the forward pass. The backward pass takes some
  words at a time, forms their logits again, and hands out each user's gradient of those rows of the
  weight. Each row is one product, as without pieces, so norms are still of what is summed.

Shapes: N tokens of all rows, D width, V words, W words of a piece, U users.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from userdp.clipping.execute.layer_swap import (
    Tape,
    compute_dtype,
    only,
    per_user,
    swapped,
    units_of,
)
from userdp.clipping.execute.models import output_layer
from userdp.clipping.kernels import reference, running
from userdp.clipping.kernels.products import TILE, products_with_squares, users_products
from userdp.index import IGNORED_LABEL
from userdp.losses import logits_of, wide_dtype

# Logits that are held at a time. A GPU needs large products to be busy.
LOGITS_AT_ONCE = 2**23
CUDA_LOGITS_AT_ONCE = 2**27
_RETURNED = "returned"


class HiddenHead:
    """An output layer that returns its input: the loss multiplies with the weight."""

    @staticmethod
    def forward(module: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The layer's own input."""
        return only(args, kwargs)


class _Watched:
    """An output layer that leaves what it returned on its tape."""

    @staticmethod
    def forward(module: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The layer's own output."""
        found = F.linear(only(args, kwargs), module.weight)
        module.userdp_tape.probes[_RETURNED] = found
        return found


def returns_its_logits(model: nn.Module) -> bool:
    """Whether what the output layer returns is what the model returns, by trial.

    Some models scale their logits or bend them (Gemma 2, Cohere).
    """
    head = output_layer(model)
    if type(head) is not nn.Linear or head.bias is not None:
        return False
    tape = Tape(users=1, rows=1)
    ids = torch.zeros(1, 2, dtype=torch.long, device=head.weight.device)
    try:
        with torch.no_grad(), swapped([(head, _Watched)], {head: tape}):
            found = logits_of(model(input_ids=ids, use_cache=False))
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return False
    return found is tape.probes.get(_RETURNED)


def token_losses(head: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    """The loss of each token (rows, length), in float32 at least; zero where there is no label."""
    tape: Tape = head.userdp_tape
    dtype = compute_dtype(hidden)
    stored, squares = tape.probes.get("weight"), tape.probes.get("squares")
    is_own = stored is None and head.weight.requires_grad
    weight = (head.weight if is_own else head.weight.detach()).to(dtype)
    hidden, flat = hidden.to(dtype), labels.flatten()
    with torch.autocast(hidden.device.type, enabled=False):
        if stored is None and not is_own:
            losses = _FrozenHead.apply(hidden.flatten(0, 1), weight, flat)
        else:
            if stored is not None and stored.dtype != dtype:
                # As for every product, squares must be taken of the values that are handed out.
                squares = None
            ends = tape.ends if tape.weight_by_user else None
            units = units_of(tape, hidden)
            losses = _TrainedHead.apply(hidden, weight, flat, units, stored, squares, ends)
    return losses.view(labels.shape)


def chunked_mean(head: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    """`losses.mean_token_loss` of the head's product with these inputs."""
    num_labelled = (labels != IGNORED_LABEL).sum(dim=1).clamp(min=1)
    return token_losses(head, hidden, labels).sum(dim=1) / num_labelled


def chunked_sum(head: Any, hidden: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """`losses.weighted_token_loss` of the head's product with these inputs."""
    losses = token_losses(head, hidden, labels)
    return (losses * weights.to(losses.dtype)).sum(dim=1)


def _pieces(like: Tensor, count: int, other: int, multiple: int) -> Iterator[slice]:
    """Slices of `count`, each with few logits beside `other`; the device decides how few."""
    most = CUDA_LOGITS_AT_ONCE if like.is_cuda else LOGITS_AT_ONCE
    size = max(multiple, most // other // multiple * multiple)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _losses_and_gradient(logits_NV: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's loss, and the gradient of its logits."""
    wide = logits_NV.to(wide_dtype(logits_NV.dtype))
    sums, counts = torch.logsumexp(wide, 1), labels != IGNORED_LABEL
    losses = torch.where(counts, sums - _of_label(wide, labels), 0.0)
    return losses, _gradient(wide, sums, labels, counts.to(wide.dtype)).to(logits_NV.dtype)


def _losses_and_sums(logits_NV: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's loss, and the logarithm of its sum over all words."""
    wide = logits_NV.to(wide_dtype(logits_NV.dtype))
    sums = torch.logsumexp(wide, 1)
    return torch.where(labels != IGNORED_LABEL, sums - _of_label(wide, labels), 0.0), sums


def _gradient_of_words(logits_NW: Tensor, sums: Tensor, labels: Tensor, upstream: Tensor) -> Tensor:
    """The gradient of some words' logits; `labels` count from the first of them."""
    wide = logits_NW.to(wide_dtype(logits_NW.dtype))
    return _gradient(wide, sums, labels, upstream).to(logits_NW.dtype)


def _of_label(wide: Tensor, labels: Tensor) -> Tensor:
    return wide.gather(1, labels.clamp(min=0)[:, None])[:, 0]


def _gradient(wide: Tensor, sums: Tensor, labels: Tensor, upstream: Tensor) -> Tensor:
    words = torch.arange(wide.shape[1], device=wide.device)
    found = (wide - sums[:, None]).exp() - (words == labels[:, None]).to(wide.dtype)
    # A token without a label has no gradient, whatever its logits are.
    return torch.where(upstream[:, None] == 0, 0.0, found * upstream[:, None])


class _FrozenHead(torch.autograd.Function):
    """Losses, with the gradient of the head's input computed on the way."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels: Tensor) -> Tensor:
        losses = hidden_ND.new_empty(len(hidden_ND), dtype=wide_dtype(hidden_ND.dtype))
        inner = torch.empty_like(hidden_ND)
        for part in _pieces(hidden_ND, len(hidden_ND), len(weight_VD), 1):
            logits = hidden_ND[part] @ weight_VD.t()
            found = running.fused(_losses_and_gradient, logits, labels[part], any_rows=True)
            losses[part] = found[0]
            torch.mm(found[1], weight_VD, out=inner[part])
        ctx.save_for_backward(inner)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (upstream,) = gradients
        (inner,) = ctx.saved_tensors
        scaled = torch.where(
            upstream[:, None] == 0, 0.0, inner.to(upstream.dtype) * upstream[:, None]
        )
        return scaled.to(inner.dtype), None, None


class _TrainedHead(torch.autograd.Function):
    """Losses; the backward pass hands out gradients of the weight, by user if probes ask for it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight_VD: Tensor,
        labels: Tensor,
        users: int | None,
        stored: Tensor | None,
        squares: Tensor | None,
        ends: Tensor | None,
    ) -> Tensor:
        hidden_ND = hidden.flatten(0, 1)
        losses = hidden_ND.new_empty(len(hidden_ND), dtype=wide_dtype(hidden_ND.dtype))
        sums = torch.empty_like(losses)
        for part in _pieces(hidden_ND, len(hidden_ND), len(weight_VD), 1):
            logits = hidden_ND[part] @ weight_VD.t()
            found = running.fused(_losses_and_sums, logits, labels[part], any_rows=True)
            losses[part], sums[part] = found
        ctx.save_for_backward(hidden, weight_VD, labels, sums, *([] if ends is None else [ends]))
        ctx.users = users
        ctx.stored, ctx.squares = stored is not None, squares is not None
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (upstream,) = gradients
        hidden, weight, labels, sums, *ends = ctx.saved_tensors
        upstream = torch.where(labels == IGNORED_LABEL, 0.0, upstream)
        hidden_ND = hidden.flatten(0, 1)
        inner = torch.zeros_like(hidden_ND, dtype=wide_dtype(hidden.dtype))
        length = per_user(hidden, ctx.users).shape[1]
        token_ends = ends[0] * length if ends else None
        count = len(ends[0]) if ends else len(hidden_ND) // length
        whole = hidden.new_empty((count, *weight.shape) if ctx.stored else weight.shape)
        squares: list[Tensor] = []
        for part in _pieces(weight, len(weight), len(hidden_ND), TILE):
            words = weight[part]
            y_NW = running.fused(
                _gradient_of_words,
                hidden_ND @ words.t(),
                sums,
                labels - part.start,
                upstream,
                any_rows=True,
            )
            reference.add_product(inner, y_NW, words)
            if not ctx.stored:
                torch.mm(y_NW.t(), hidden_ND, out=whole[part])
            elif ctx.squares:
                found = products_with_squares(y_NW, hidden_ND, count, token_ends, length)
                whole[:, part] = found[0]
                squares.append(found[1])
            else:
                whole[:, part] = users_products(y_NW, hidden_ND, count, token_ends)
        dx = inner.to(hidden.dtype).view(hidden.shape)
        stored, dw = (whole, None) if ctx.stored else (None, whole)
        return dx, dw, None, None, stored, torch.cat(squares) if squares else None, None
