"""Whether logits are computed piece by piece (`chunked_head`), decided from public numbers."""

from __future__ import annotations

import math

from torch import nn

from userdp.clipping.batches.users import Users
from userdp.clipping.execute.chunked_head import returns_its_logits
from userdp.clipping.execute.models import output_layer
from userdp.clipping.gradients.probes import pair_is_cheaper
from userdp.errors import InputError
from userdp.losses import RecordLoss, causal_lm_loss

# Logits of a full batch of at least this many bytes come in pieces, unless that is forbidden.
LARGE_LOGITS = 2**31


def chunks_logits(
    model: nn.Module, record_loss: RecordLoss, wanted: bool | None, *, tokens: int, itemsize: int
) -> bool:
    """Whether this model's logits come in pieces; raises if that is asked for and cannot be.

    `tokens` is the size of a full batch and `itemsize` the bytes of a logit.
    """
    head = output_layer(model)
    width = getattr(head, "out_features", 0)
    if wanted is False or (wanted is None and tokens * width * itemsize < LARGE_LOGITS):
        return False
    can = record_loss is causal_lm_loss and returns_its_logits(model)
    if wanted and not can:
        raise InputError(
            f"chunk_logits=True, but the logits of {type(model).__name__} are not the plain "
            "product of an output layer, or the loss is one's own. Leave chunk_logits off; a "
            "smaller microbatch_tokens saves memory with any model."
        )
    return can


def keeps_logits(model: nn.Module, users: Users) -> bool:
    """Whether a batch needs all logits' gradients at once: short users, whose head is trained.

    Their gradients of the head are pairs, which hold the logits' gradients. Stored ones would be
    larger still.
    """
    head = output_layer(model)
    ids = users.batch["input_ids"]
    if not head.weight.requires_grad or not ids.is_cuda:
        return False
    ranges = users.ranges
    rows = len(ids) / users.count
    if ranges is not None:
        rows = math.sqrt(ranges.fewest_rows * ranges.most_rows)
    return pair_is_cheaper(rows * ids.shape[1], head.in_features, [head.out_features])
