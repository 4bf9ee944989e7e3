"""A user's records one after the other, so that short records need little padding.

If a user's records differ in length, rows as long as the longest one are mostly padding. Here all
records of a user form one line of tokens, which is cut into short rows of equal length. A record
may reach from one row into the next: attention follows it (`record_attention`), and all other
layers see single tokens. No record sees another, and positions begin again with each. A token
weighs what it would weigh in a row of its own. So the gradient is the same, from fewer tokens.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from userdp.clipping.batches.users import PADDING, size_of
from userdp.clipping.execute.models import can_skip_mask, pretrained
from userdp.clipping.execute.record_attention import RECORD_ATTENTION, attention_named
from userdp.clipping.kernels.products import TOKENS_OF_ONE_USER
from userdp.index import ranges
from userdp.losses import (
    IGNORED_LABEL,
    JOINED_LEFT,
    JOINED_POSITION,
    JOINED_WEIGHT,
    Batch,
    RecordLoss,
    causal_lm_loss,
    on_device,
    record_layout,
)
from userdp.model_settings import FIXED_ROTATIONS, every_setting

# Tokens of a row. A user's last row is padded: half a row on average.
ROW = {"cpu": 16, "cuda": TOKENS_OF_ONE_USER}
# A user's records are joined if a smaller share of the padded tokens than this belongs to them. On
# the CPU attention has to move them.
FULL_ENOUGH = {"cpu": 0.8, "cuda": 0.65}
# Users of at most this many tokens are small. Where groups may be larger, small ones are joined on
# CUDA however full their rows are: a few with full rows would need batches of another shape.
SMALL = 512
# Where groups may be larger and records have at most this many tokens, all users are joined on
# CUDA. Attention across rows then costs hardly more than within rows, and a cohort needs one kind
# of batch instead of two.
SHORT_RECORD = 256
_SEPARATE = {"input_ids", "labels", "attention_mask"}
# The trial joins a record of this many tokens with another one. Rounding may move logits this far.
_TRIAL = 5
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4}
_COARSE_TOLERANCE = 0.05
# The names under which configurations list the kinds of layers, and the kinds that take a mask.
_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types", "attn_type_list")
_ATTENTION = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
# Layers that carry one token to another and take no mask.
_UNMASKED = (nn.modules.conv._ConvNd, nn.RNNBase)


def is_joined(batch: Batch) -> bool:
    """Whether rows of the batch may hold several records."""
    return JOINED_LEFT in batch


def worth_joining(
    group: Batch, device: str, sequence_length: int | None = None, group_size: int | None = None
) -> bool:
    """Whether joining the group's records saves much.

    The group must hold tokens and labels, and nothing else that is learned from. On CUDA records
    are compared with rows of the declared length: a few users with shorter rows would need batches
    of their own, each of another shape. The declared length, and `group_size`, the most rows of a
    group, are public.
    """
    if not {"input_ids", "labels"} <= group.keys() <= _SEPARATE or group["labels"].dim() != 2:
        return False
    size, own = size_of(group), int(_lengths(group).sum())
    length = size.length
    if device == "cuda" and sequence_length is not None:
        length = max(length, sequence_length)
        may_be_large = (group_size or 0) * sequence_length > SMALL
        if may_be_large and (own <= SMALL or sequence_length <= SHORT_RECORD):
            return True
    return own < FULL_ENOUGH.get(device, 0.0) * size.rows * length


def can_join(model: nn.Module, record_loss: RecordLoss, longest: int) -> bool:
    """Whether the model keeps joined records of up to `longest` tokens apart.

    The answer comes from what the model is made of, and from a trial.
    """
    inner = pretrained(model)
    if inner is None or record_loss is not causal_lm_loss:
        return False
    takes = inspect.signature(inner.forward).parameters.keys()
    return (
        {"position_ids", "attention_mask"} <= takes
        and hasattr(model, "generation_config")
        and inner.config._attn_implementation == "sdpa"
        and can_skip_mask(model, longest)
        and _meets_in_attention_alone(inner)
        and _keeps_apart(model, inner, longest)
    )


def _meets_in_attention_alone(inner: PreTrainedModel) -> bool:
    """Whether only attention, which takes a mask, carries one token to another."""
    if any(isinstance(module, _UNMASKED) for module in inner.modules()):
        return False
    found = list(every_setting(inner.config.to_dict()))
    layers = {kind for key, kinds in found if key in _LAYER_LISTS for kind in kinds or ()}
    rotations = {kind for key, kind in found if key in ("rope_type", "type") and kind is not None}
    return layers <= _ATTENTION and rotations <= FIXED_ROTATIONS


@torch.no_grad()
def _keeps_apart(model: nn.Module, inner: PreTrainedModel, longest: int) -> bool:
    """Whether two records, one of the greatest length, have the same logits in one row as in two.

    The second record's logits must also stay the same, to the last bit, when the first changes.
    """
    weight = next(model.parameters())
    embedding: Any = inner.get_input_embeddings()
    vocabulary = len(embedding.weight)
    first, second = (torch.arange(length)[None] % vocabulary for length in (_TRIAL, longest))
    other = (first + 1) % vocabulary
    row = ROW.get(weight.device.type, ROW["cpu"])

    def together(*records: Tensor) -> Tensor:
        """The logits of the records in rows that they share."""
        width = max(record.shape[1] for record in records)
        ids = torch.cat([F.pad(record, (0, width - record.shape[1])) for record in records])
        ends = torch.tensor([record.shape[1] for record in records])[:, None]
        labels = torch.where(torch.arange(width) < ends, ids, IGNORED_LABEL)
        rows = joined({"input_ids": ids, "labels": labels}, row)
        sent = on_device(rows, weight.device)
        with attention_named(model, RECORD_ATTENTION):
            found = model(
                input_ids=sent["input_ids"],
                position_ids=sent[JOINED_POSITION],
                attention_mask=record_layout(sent),
                use_cache=False,
            ).logits
        return found.flatten(0, 1)[: _TRIAL + longest]

    try:
        same, changed = together(first, second), together(other, second)
        alone = [
            model(input_ids=ids.to(weight.device), use_cache=False).logits[0]
            for ids in (first, second)
        ]
    except Exception:
        # The model does not take such rows, although its signature says so.
        return False
    expected = torch.cat(alone)
    tolerance = _TOLERANCES.get(weight.dtype, _COARSE_TOLERANCE)
    is_close = bool((same - expected).abs().max() <= tolerance * expected.abs().max())
    return is_close and torch.equal(same[_TRIAL:], changed[_TRIAL:])


def joined(group: Batch, row: int) -> dict[str, Tensor]:
    """The group's records one after the other, in rows of `row` tokens; the last one is padded.

    The label of a token is the label of the token that follows it in its record. Tokens are
    weighted so that the mean over rows of their weighted losses equals the mean over records of the
    mean token loss.
    """
    ids, labels = (group[name].cpu().numpy() for name in ("input_ids", "labels"))
    lengths = _lengths(group)
    record = np.repeat(np.arange(len(lengths)), lengths)
    column = ranges(0, lengths)
    left = lengths[record] - column - 1
    following = np.minimum(column + 1, labels.shape[1] - 1)
    next_labels = np.where(left > 0, labels[record, following], IGNORED_LABEL)
    labelled = np.bincount(record[next_labels != IGNORED_LABEL], minlength=len(lengths))
    num_rows = -(-len(record) // row)
    weights = num_rows / (len(lengths) * np.maximum(labelled, 1))

    def laid(name: str, values: NDArray[np.generic]) -> Tensor:
        line = np.full(num_rows * row, PADDING[name], values.dtype)
        line[: len(values)] = values
        return torch.from_numpy(line.reshape(num_rows, row)).to(group["input_ids"].device)

    found = {
        "input_ids": ids[record, column],
        "labels": next_labels,
        JOINED_POSITION: column,
        JOINED_LEFT: left,
        JOINED_WEIGHT: weights[record],
    }
    return {name: laid(name, values) for name, values in found.items()}


def separated(rows: Batch) -> dict[str, Tensor]:
    """The joined records, each in a row of its own again, as `causal_lm_loss` takes them."""
    ids, labels, position, left = (
        rows[name].flatten() for name in ("input_ids", "labels", JOINED_POSITION, JOINED_LEFT)
    )
    starts = ((position == 0) & (left >= 0)).nonzero().flatten().tolist()
    ends = [start + 1 + int(left[start]) for start in starts]
    width = max(end - start for start, end in zip(starts, ends, strict=True))
    found = {
        "input_ids": ids.new_full((len(starts), width), PADDING["input_ids"]),
        "labels": labels.new_full((len(starts), width), IGNORED_LABEL),
    }
    for record, (start, end) in enumerate(zip(starts, ends, strict=True)):
        found["input_ids"][record, : end - start] = ids[start:end]
        found["labels"][record, 1 : end - start] = labels[start : end - 1]
    return found


def _lengths(group: Batch) -> NDArray[np.int64]:
    """Tokens of each record up to its last label, at least one; what follows changes nothing."""
    labelled = group["labels"].cpu().numpy() != IGNORED_LABEL
    behind = np.argmax(labelled[:, ::-1], axis=1)
    return np.where(labelled.any(1), labelled.shape[1] - behind, 1)
