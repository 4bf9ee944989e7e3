"""Several records of a user in one row, none of which sees another: short records without padding.

Where a user's records are of unlike length, rows as long as the longest are mostly padding. Here
records lie one after the other in rows, the longest put first and each into the first row with
room. Attention is masked record by record, positions begin anew with each, and a token weighs what
it weighs in a row of its own: the gradient is the same, from fewer tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from userdp.clipping.compiled import can_skip_mask, pretrained
from userdp.clipping.pack import power_of_two, size_of
from userdp.updates import IGNORED_LABEL, Batch, RecordLoss, causal_lm_loss, record_mask

# Rows in which short records are joined are at least this long.
USUAL_ROW = 128
# Joined where less than this share of the padded tokens are a record's.
FULL_ENOUGH = 0.8
_SEPARATE = {"input_ids", "labels", "attention_mask"}
# The records of the trial, and how far rounding may move their logits.
_TRIAL = (3, 4)
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE_TOLERANCE = 0.05


def is_joined(batch: Batch) -> bool:
    """Whether rows of the batch may hold several records."""
    return "record_in_row" in batch


def worth_joining(groups: Sequence[Batch]) -> bool:
    """Whether much of the groups' rows is padding, and they are nothing but tokens."""
    if not groups or not {"input_ids", "labels"} <= groups[0].keys() <= _SEPARATE:
        return False
    padded = sum(size_of(group).tokens for group in groups)
    own = sum(int(_lengths(group).sum()) for group in groups)
    return own < FULL_ENOUGH * padded


def can_join(model: nn.Module, record_loss: RecordLoss, longest_row: int) -> bool:
    """Whether the model can be told which tokens of a row are one record: seen by trial."""
    inner = pretrained(model)
    if inner is None or record_loss is not causal_lm_loss:
        return False
    told = {"position_ids", "attention_mask"} <= inspect.signature(inner.forward).parameters.keys()
    uses_mask = inner.config._attn_implementation == "sdpa"
    return told and uses_mask and can_skip_mask(model, longest_row) and _keeps_apart(model)


@torch.no_grad()
def _keeps_apart(model: nn.Module) -> bool:
    """Whether two records have the same logits in one row as in two."""
    weight = next(model.parameters())
    ids = torch.arange(sum(_TRIAL), device=weight.device)[None]
    number = torch.repeat_interleave(torch.tensor(_TRIAL)).to(weight.device)[None]
    positions = torch.cat([torch.arange(n) for n in _TRIAL]).to(weight.device)[None]
    try:
        together = model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=record_mask(number),
            use_cache=False,
        ).logits
        apart = [model(input_ids=part, use_cache=False).logits for part in ids.split(_TRIAL, 1)]
    except (RuntimeError, TypeError, ValueError):
        # Not made for such masks.
        return False
    expected = torch.cat(apart, 1)
    tolerance = _TOLERANCES.get(weight.dtype, _COARSE_TOLERANCE)
    return bool((together - expected).abs().max() <= tolerance * expected.abs().max())


def joined(group: Batch, longest_row: int, *, ladder: bool = False) -> dict[str, Tensor]:
    """The group's records in as few tokens as rows of some length up to `longest_row` allow.

    With `ladder`, tokens are counted as in rows that are padded to a power of two.
    `record_in_row` numbers the records of a row from 1; padding is 0. By `token_weights`, the mean
    over rows of their weighted losses is the mean over records of their mean token losses.
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
        "position_ids": laid(column, 0),
        "record_in_row": laid(number[record], 0),
        "token_weights": laid(weights[record], 0),
    }


def separated(rows: Batch) -> dict[str, Tensor]:
    """Joined records in rows of their own again, as `causal_lm_loss` takes them."""
    number = rows["record_in_row"]
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
    """Tokens of each record up to its last label: what follows changes nothing. At least one."""
    labelled = group["labels"].cpu().numpy() != IGNORED_LABEL
    behind = np.argmax(labelled[:, ::-1], axis=1)
    return np.where(labelled.any(1), labelled.shape[1] - behind, 1)


def _best_places(
    lengths: NDArray[np.int64], longest_row: int, ladder: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Each record's row and start, and the rows' width, for the fewest tokens in all."""
    longest = int(lengths.max())
    sizes = [max(longest, min(power_of_two(longest), longest_row)) if ladder else longest]
    while (size := power_of_two(sizes[-1] + 1)) <= longest_row:
        sizes.append(size)

    def tokens(found: tuple[NDArray[np.int64], NDArray[np.int64], int]) -> int:
        rows, _, width = found
        return (int(rows.max()) + 1) * (power_of_two(width) if ladder else width)

    return min((_first_fit(lengths, size) for size in sizes), key=tokens)


def _first_fit(
    lengths: NDArray[np.int64], size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    used: list[int] = []
    rows, starts = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    for record in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[record])
        row = next((r for r, taken in enumerate(used) if taken + length <= size), len(used))
        if row == len(used):
            used.append(0)
        rows[record], starts[record] = row, used[row]
        used[row] += length
    return rows, starts, max(used)


def _numbers_in_rows(rows: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each record's number in its row, from 1, in the order of their starts."""
    order = np.lexsort((starts, rows))
    numbers = np.empty(len(rows), np.int64)
    sorted_rows = rows[order]
    firsts = np.searchsorted(sorted_rows, sorted_rows)
    numbers[order] = np.arange(len(rows)) - firsts + 1
    return numbers
