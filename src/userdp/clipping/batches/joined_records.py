"""Several records of a user in one row, so that short records need little padding.

If a user's records differ in length, rows as long as the longest one are mostly padding. Here
records lie one after the other in a row. They are placed from the longest to the shortest, each
into the fullest row that has room. No record sees another: attention is masked record by record,
and positions begin again with each. A token weighs what it would weigh in a row of its own. So the
gradient is the same, from fewer tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from userdp.clipping.batches.users import power_of_two, size_of
from userdp.clipping.execute.models import can_skip_mask, pretrained
from userdp.losses import (
    IGNORED_LABEL,
    JOINED_POSITION,
    JOINED_RECORD,
    JOINED_WEIGHT,
    Batch,
    RecordLoss,
    causal_lm_loss,
    record_mask,
)

# Short records may share rows up to this length; longer ones up to their own.
USUAL_ROW = 128
# Records are joined if a smaller share of the padded tokens than this belongs to records. On CUDA
# attention with a mask makes a step a fifth slower (GPT-2 small on an H200).
FULL_ENOUGH = {"cpu": 0.8, "cuda": 0.6}
_SEPARATE = {"input_ids", "labels", "attention_mask"}
# The trial joins a record of this many tokens with another one. Rounding may move logits this far.
_TRIAL = 5
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4}
_COARSE_TOLERANCE = 0.05
# Rotary embeddings whose angles do not depend on how long the row is.
_FIXED_ROTATIONS = {"default", "linear", "llama3", "yarn", "proportional"}
# The names under which configurations list the kinds of layers, and the kinds that take a mask.
_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types", "attn_type_list")
_ATTENTION = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
# Layers that carry one token to another and take no mask.
_UNMASKED = (nn.modules.conv._ConvNd, nn.RNNBase)


def is_joined(batch: Batch) -> bool:
    """Whether rows of the batch may hold several records."""
    return JOINED_RECORD in batch


def worth_joining(groups: Sequence[Batch], device: str) -> bool:
    """Whether the groups hold only tokens and labels, and their rows are padded that much."""
    if not groups or not {"input_ids", "labels"} <= groups[0].keys() <= _SEPARATE:
        return False
    if groups[0]["labels"].dim() != 2:
        return False
    padded = sum(size_of(group).tokens for group in groups)
    own = sum(int(_lengths(group).sum()) for group in groups)
    return own < FULL_ENOUGH.get(device, 0.0) * padded


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
    found = list(_values(inner.config.to_dict()))
    layers = {kind for key, kinds in found if key in _LAYER_LISTS for kind in kinds or ()}
    rotations = {kind for key, kind in found if key in ("rope_type", "type") and kind is not None}
    return layers <= _ATTENTION and rotations <= _FIXED_ROTATIONS


def _values(settings: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting and its name, at any depth."""
    yield key, settings
    if isinstance(settings, dict):
        for name, value in settings.items():
            yield from _values(value, str(name))


@torch.no_grad()
def _keeps_apart(model: nn.Module, inner: PreTrainedModel, longest: int) -> bool:
    """Whether two records, one of the greatest length, have the same logits in one row as in two.

    The second record's logits must also stay the same, to the last bit, when the first changes.
    """
    weight = next(model.parameters())
    embedding: Any = inner.get_input_embeddings()
    vocabulary = len(embedding.weight)
    lengths = torch.tensor([_TRIAL, longest])
    ids = (torch.arange(_TRIAL + longest) % vocabulary).to(weight.device)[None]
    number = torch.repeat_interleave(lengths).to(weight.device)[None] + 1
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()]).to(weight.device)[None]

    def logits(tokens: Tensor) -> Tensor:
        mask = record_mask(number)
        return model(
            input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False
        ).logits

    try:
        together = logits(ids)
        others = logits(torch.where(number == 1, (ids + 1) % vocabulary, ids))
        parts = ids.split(lengths.tolist(), 1)
        expected = torch.cat([model(input_ids=part, use_cache=False).logits for part in parts], 1)
    except Exception:
        # The model does not take such masks, although its signature says so.
        return False
    tolerance = _TOLERANCES.get(weight.dtype, _COARSE_TOLERANCE)
    same = bool((together - expected).abs().max() <= tolerance * expected.abs().max())
    return same and torch.equal(together[:, _TRIAL:], others[:, _TRIAL:])


def joined(group: Batch, longest_row: int, *, ladder: bool = False) -> dict[str, Tensor]:
    """The group's records laid into rows, at the row length that gives the fewest tokens.

    Rows are at least as long as the longest record, and at most `longest_row` unless it is longer.
    With `ladder`, tokens are counted as if rows were padded to a power of two. The records of a row
    are numbered from 1; padding has number 0. Tokens are weighted so that the mean over rows of
    their weighted losses equals the mean over records of the mean token loss.
    """
    ids, labels = (group[name].cpu().numpy() for name in ("input_ids", "labels"))
    lengths = _lengths(group)
    rows, starts, width = _best_places(lengths, longest_row, ladder)
    num_rows = int(rows.max()) + 1
    record = np.repeat(np.arange(len(lengths)), lengths)
    column = np.arange(len(record)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    place = (rows[record], starts[record] + column)
    own_labels = labels[record, column]
    # The first token of a record is not predicted.
    own_labels[column == 0] = IGNORED_LABEL
    labelled = np.bincount(record[own_labels != IGNORED_LABEL], minlength=len(lengths))
    weights = num_rows / (len(lengths) * np.maximum(labelled, 1))
    number = _numbers_in_rows(rows, starts)

    def laid(values: NDArray[np.generic], empty: int) -> Tensor:
        whole = np.full((num_rows, width), empty, values.dtype)
        whole[place] = values
        return torch.from_numpy(whole).to(group["input_ids"].device)

    return {
        "input_ids": laid(ids[record, column], 0),
        "labels": laid(own_labels, IGNORED_LABEL),
        JOINED_POSITION: laid(column, 0),
        JOINED_RECORD: laid(number[record], 0),
        JOINED_WEIGHT: laid(weights[record], 0),
    }


def separated(rows: Batch) -> dict[str, Tensor]:
    """The joined records, each in a row of its own again, as `causal_lm_loss` takes them."""
    number = rows[JOINED_RECORD]
    spans = [
        (row, start, stop)
        for row, numbers in enumerate(number)
        for start, stop in pairwise([*_changes(numbers), len(numbers)])
        if numbers[start] > 0
    ]
    width = max(stop - start for _, start, stop in spans)
    found: dict[str, Tensor] = {}
    for name, empty in (("input_ids", 0), ("labels", IGNORED_LABEL)):
        found[name] = number.new_full((len(spans), width), empty)
        for record, (row, start, stop) in enumerate(spans):
            found[name][record, : stop - start] = rows[name][row, start:stop]
    return found


def _changes(numbers: Tensor) -> list[int]:
    return [0, *((numbers[1:] != numbers[:-1]).nonzero().flatten() + 1).tolist()]


def _lengths(group: Batch) -> NDArray[np.int64]:
    """Tokens of each record up to its last label, at least one; what follows changes nothing."""
    labelled = group["labels"].cpu().numpy() != IGNORED_LABEL
    behind = np.argmax(labelled[:, ::-1], axis=1)
    return np.where(labelled.any(1), labelled.shape[1] - behind, 1)


def _best_places(
    lengths: NDArray[np.int64], longest_row: int, ladder: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Each record's row and start, and the row width, chosen for the fewest tokens in all."""
    longest = int(lengths.max())
    sizes = [max(longest, min(power_of_two(longest), longest_row)) if ladder else longest]
    while (size := power_of_two(sizes[-1] + 1)) <= longest_row:
        sizes.append(size)

    def tokens(found: tuple[NDArray[np.int64], NDArray[np.int64], int]) -> int:
        rows, _, width = found
        return (int(rows.max()) + 1) * (power_of_two(width) if ladder else width)

    return min((_best_fit(lengths, size) for size in sizes), key=tokens)


def _best_fit(
    lengths: NDArray[np.int64], size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Each record's row and start, and the width needed, in rows of at most `size` tokens.

    Records are placed from the longest to the shortest, each into the fullest row with room.
    """
    # Rows by how much room they have. Bit r of `rooms` says whether a row has room for r tokens.
    rows_with: list[list[int]] = [[] for _ in range(size + 1)]
    rooms = num_rows = 0
    rows, starts = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    for record in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[record])
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            row = rows_with[room].pop()
            if not rows_with[room]:
                rooms ^= 1 << room
        else:
            room, row = size, num_rows
            num_rows += 1
        rows[record], starts[record] = row, size - room
        rows_with[room - length].append(row)
        rooms |= 1 << (room - length)
    return rows, starts, int((starts + lengths).max())


def _numbers_in_rows(rows: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each record's number in its row: from 1, in the order of the records' starts."""
    order = np.lexsort((starts, rows))
    numbers = np.empty(len(rows), np.int64)
    sorted_rows = rows[order]
    firsts = np.searchsorted(sorted_rows, sorted_rows)
    numbers[order] = np.arange(len(rows)) - firsts + 1
    return numbers
