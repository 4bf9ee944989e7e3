"""A batch of users: whose rows are whose, what each row weighs, and how shorter ones are padded.

A padded token has no label. A padded row and a place without a user have weight zero. So the
gradient of all padding is exactly zero.

Secret: everything here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from userdp.losses import (
    IGNORED_LABEL,
    JOINED_LEFT,
    JOINED_POSITION,
    JOINED_WEIGHT,
    Batch,
    records_in,
    sent,
)

# What is put behind the end of a record. Tensors of other names are not padded: groups share a
# batch only if those have the same shape.
PADDING = {
    "input_ids": 0,
    "labels": IGNORED_LABEL,
    "attention_mask": 0,
    "token_type_ids": 0,
    JOINED_POSITION: 0,
    JOINED_LEFT: -1,
    JOINED_WEIGHT: 0,
}


def is_padded(name: str, tensor: Tensor) -> bool:
    """Whether the tensor's second dimension counts tokens; with one label a record it does not."""
    return name in PADDING and tensor.dim() > 1


def kind_of(group: Batch) -> str:
    """What rows look like: names, dtypes and shapes, but not the number and length of rows."""
    return repr(
        sorted(
            (name, str(tensor.dtype), tuple(tensor.shape[2 if is_padded(name, tensor) else 1 :]))
            for name, tensor in group.items()
        )
    )


@dataclass(frozen=True, kw_only=True)
class RowRanges:
    """Whose rows are whose in a ragged batch: user u has rows `starts[u]` to `starts[u + 1]`.

    Every row belongs to a place: first come the users, then places with rows of padding, then
    places without rows. No place has more than `most_rows` rows, and few have less than
    `fewest_rows`. The largest batch for such users has `full_rows` rows. `user_starts` are the same
    as `starts`, but there a place of padding has no rows: its gradient is zero, and need not be
    computed.
    """

    starts: Tensor
    user_of_row: Tensor
    user_starts: Tensor
    fewest_rows: int
    most_rows: int
    full_rows: int


@dataclass(frozen=True, kw_only=True)
class Users:
    """Rows of several users as one batch; the rows of a user are adjacent.

    All users have the same number of rows, unless `ranges` says otherwise. `weights` is 1 / (number
    of the user's rows) for a row with records and 0 for a row of padding.
    """

    batch: dict[str, Tensor]
    weights: Tensor
    count: int
    ranges: RowRanges | None = None

    @property
    def shape(self) -> tuple[Any, ...]:
        """What two batches must have in common to run through the same captured graph."""
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in self.batch.items())
        most = None if self.ranges is None else self.ranges.most_rows
        return self.count, most, shapes

    @property
    def rows(self) -> int:
        """Rows of each user, where all have the same number."""
        assert self.ranges is None
        return len(self.weights) // self.count

    def rows_of(self, user: int) -> tuple[int, int]:
        """Where a user's rows begin and end. Waits for the device."""
        if self.ranges is None:
            return user * self.rows, (user + 1) * self.rows
        start, stop = self.ranges.starts[user : user + 2].tolist()
        return start, stop

    @property
    def taking_part(self) -> Tensor:
        """Which places hold a user with a record. Secret."""
        if self.ranges is None:
            return self.weights.view(self.count, -1).sum(1) > 0
        by_user = self.weights.new_zeros(self.count)
        return by_user.index_add(0, self.ranges.user_of_row, self.weights) > 0

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor of the batch."""
        tensors = [*self.batch.values(), self.weights]
        if self.ranges is None:
            return tensors
        return [*tensors, self.ranges.starts, self.ranges.user_of_row, self.ranges.user_starts]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Users:
        """The same layout with other `tensors`."""
        batch = dict(zip(self.batch, tensors, strict=False))
        weights, *rest = tensors[len(batch) :]
        ranges = self.ranges
        if ranges is not None:
            starts, user_of_row, user_starts = rest
            ranges = replace(
                ranges, starts=starts, user_of_row=user_of_row, user_starts=user_starts
            )
        return replace(self, batch=batch, weights=weights, ranges=ranges)

    def sent_to(self, device: torch.device) -> Users:
        """The same users on a device. Nobody waits for copies to a GPU."""
        return self.with_tensors([sent(tensor, device) for tensor in self.tensors])


# Names and shapes of the tensors that cannot be padded.
Rest = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, kw_only=True, order=True)
class Size:
    """Rows of a group, tokens of its longest row, and the shapes of what cannot be padded."""

    rows: int
    length: int
    rest: Rest = ()

    @property
    def tokens(self) -> int:
        """Tokens of a group padded to this size."""
        return self.rows * self.length

    def holds(self, other: Size) -> bool:
        """Whether a group of the other size fits."""
        return self.rows >= other.rows and self.length >= other.length and self.rest == other.rest


def size_of(group: Batch) -> Size:
    """A group's own size."""
    lengths = [tensor.shape[1] for name, tensor in group.items() if is_padded(name, tensor)]
    rest = tuple(
        (name, tuple(tensor.shape[1:]))
        for name, tensor in group.items()
        if not is_padded(name, tensor)
    )
    return Size(rows=records_in(group), length=max(lengths, default=1), rest=rest)


def has_tokens(groups: Sequence[Batch]) -> bool:
    """Whether the groups' rows are sequences of tokens; the first group tells for all."""
    return any(is_padded(name, tensor) for group in groups[:1] for name, tensor in group.items())


def padded_together(groups: Sequence[Batch], size: Size, count: int) -> Users:
    """The groups padded to one size, with empty places up to `count` users."""
    starts = range(0, len(groups) * size.rows, size.rows)
    batch, weights = laid_out(groups, starts, rows=count * size.rows, length=size.length)
    return Users(batch=batch, weights=weights, count=count)


def laid_out(
    groups: Sequence[Batch], starts: Sequence[int], *, rows: int, length: int
) -> tuple[dict[str, Tensor], Tensor]:
    """A batch of `rows` rows in which each group begins at its start, and the rows' weights."""
    first = groups[0]
    batch: dict[str, Tensor] = {}
    for name, tensor in first.items():
        if is_padded(name, tensor):
            whole = tensor.new_full((rows, length, *tensor.shape[2:]), PADDING[name])
        else:
            whole = tensor.new_empty((rows, *tensor.shape[1:]))
        for start, stop, group in zip(starts, [*starts[1:], rows], groups, strict=True):
            part = group[name]
            own = whole[start : start + len(part)]
            (own[:, : part.shape[1]] if is_padded(name, part) else own).copy_(part)
            if not is_padded(name, part):
                # The model must be able to read a padded row, so it is a copy with weight zero. It
                # copies a row of the same user: if that is not finite, zero times it is not either.
                whole[start + len(part) : stop] = part[:1]
        batch[name] = whole
    device = next(iter(first.values())).device
    weights = torch.zeros(rows, dtype=torch.float64, device=device)
    for start, group in zip(starts, groups, strict=True):
        num_records = records_in(group)
        weights[start : start + num_records] = 1 / num_records
    attend_to_empty_rows(batch, weights == 0)
    return batch, weights


def attend_to_empty_rows(batch: dict[str, Tensor], empty: Tensor) -> None:
    """Let each row of padding have one place that is attended to.

    A model that takes the mean over these places would divide by zero otherwise, and zero times
    what is not finite is not zero: how many rows another user has would decide who counts.
    """
    mask = batch.get("attention_mask")
    if mask is not None and mask.dim() > empty.dim():
        mask[empty, 0] = 1


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below the number."""
    return 1 << (number - 1).bit_length()
