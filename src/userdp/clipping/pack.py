"""A cohort's ragged groups as few batches of few shapes, padded so that padding counts for nothing.

Users differ in records and records in length. Groups of like size share a batch; each gets as many
rows as the largest needs. A padded token has no label, a padded row and a padded user weight zero:
their gradient is exactly zero.

Compiled steps want shapes that come back: then rows and lengths are rounded up to a ladder, and so
is the number of users. Groups left over from one shape go into the next larger one.

Secret: everything here but the budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from userdp.losses import (
    IGNORED_LABEL,
    JOINED_POSITION,
    JOINED_RECORD,
    JOINED_WEIGHT,
    Batch,
)

# What is put where a record has ended. Other tensors are not padded, only batched with their like.
PADDING = {
    "input_ids": 0,
    "labels": IGNORED_LABEL,
    "attention_mask": 0,
    "token_type_ids": 0,
    JOINED_POSITION: 0,
    JOINED_RECORD: 0,
    JOINED_WEIGHT: 0,
}


def is_padded(name: str, tensor: Tensor) -> bool:
    """Whether the tensor counts tokens in its second dimension; one label a record does not."""
    return name in PADDING and tensor.dim() > 1


# Padded tokens for each of a group's own, where groups of unlike size share a batch.
MOST_PADDING = 1.5


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Whose rows are whose where users have unlike many: u's are `starts[u]` to `starts[u + 1]`.

    Every row is somebody's: behind the users come places with rows of padding, then places without.
    No user has more than `most_rows`, and few have less than `fewest_rows`.
    """

    starts: Tensor
    user_of_row: Tensor
    fewest_rows: int
    most_rows: int


@dataclass(frozen=True, kw_only=True)
class Users:
    """Several users' rows as one batch, those of a user adjacent: equally many, or as `runs` says.

    `weights` is 1 / (the user's rows) for a row with records and 0 for a row of padding.
    """

    batch: dict[str, Tensor]
    weights: Tensor
    count: int
    runs: Runs | None = None

    @property
    def shape(self) -> tuple[Any, ...]:
        """What a step captured for one batch needs to be the same in the next."""
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in self.batch.items())
        most = None if self.runs is None else self.runs.most_rows
        return self.count, most, shapes

    @property
    def rows(self) -> int:
        """Rows of each user, where all have equally many."""
        assert self.runs is None
        return len(self.weights) // self.count

    def rows_of(self, user: int) -> tuple[int, int]:
        """Where a user's rows begin and end. Asks the device."""
        if self.runs is None:
            return user * self.rows, (user + 1) * self.rows
        start, stop = self.runs.starts[user : user + 2].tolist()
        return start, stop

    @property
    def taking_part(self) -> Tensor:
        """Which places have a user with a record. Secret."""
        if self.runs is None:
            return self.weights.view(self.count, -1).sum(1) > 0
        by_user = self.weights.new_zeros(self.count)
        return by_user.index_add(0, self.runs.user_of_row, self.weights) > 0

    @property
    def tensors(self) -> list[Tensor]:
        """Everything here that is on the device."""
        runs = [] if self.runs is None else [self.runs.starts, self.runs.user_of_row]
        return [*self.batch.values(), self.weights, *runs]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Users:
        """The same with other `tensors`."""
        batch = dict(zip(self.batch, tensors, strict=False))
        weights, *rest = tensors[len(batch) :]
        runs = self.runs
        if runs is not None:
            starts, user_of_row = rest
            runs = replace(runs, starts=starts, user_of_row=user_of_row)
        return replace(self, batch=batch, weights=weights, runs=runs)


# Names and shapes of what cannot be padded.
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
    return Size(rows=len(next(iter(group.values()))), length=max(lengths, default=1), rest=rest)


def has_tokens(groups: Sequence[Batch]) -> bool:
    """Whether the groups' rows are sequences, whose cost their length tells."""
    return any(is_padded(name, tensor) for group in groups[:1] for name, tensor in group.items())


def pack(
    groups: Sequence[Batch],
    *,
    max_tokens: int,
    ladder: bool,
    max_users: int | None = None,
    max_length: int | None = None,
) -> Iterator[Users]:
    """Batches of at most `max_tokens` padded tokens (or of one group) that hold all the groups.

    Groups without a record are left out: their update is zero. With `ladder`, sizes come from a
    short list; rows are not padded beyond `max_length`.
    """
    members: dict[Size, list[int]] = {}
    for place, group in enumerate(groups):
        size = size_of(group)
        if size.rows:
            members.setdefault(_rounded(size, max_length) if ladder else size, []).append(place)
    waiting = sorted(members)
    for position, size in enumerate(waiting):
        places = members[size]
        limit = max(1, max_tokens // size.tokens)
        limit = limit if max_users is None else min(limit, max_users)
        full = len(places) // limit * limit
        for start in range(0, full, limit):
            yield together([groups[i] for i in places[start : start + limit]], size, limit)
        left = places[full:]
        larger = next((other for other in waiting[position + 1 :] if other.holds(size)), None)
        if larger is not None and larger.tokens <= max_tokens:
            # A step that is not captured costs what its tokens cost: do not pad beyond reason.
            most = math.inf if ladder else MOST_PADDING
            moved = [i for i in left if larger.tokens <= most * size_of(groups[i]).tokens]
            members[larger] += moved
            left = [i for i in left if i not in moved]
        if left:
            count = min(limit, ladder_step(len(left))) if ladder else len(left)
            yield together([groups[i] for i in left], size, count)


def _rounded(size: Size, max_length: int | None) -> Size:
    length = max(16, ladder_step(size.length)) if size.length > 1 else 1
    if max_length is not None and length > max_length:
        length = max(size.length, max_length)
    return Size(rows=ladder_step(size.rows), length=length, rest=size.rest)


def ladder_step(number: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, ... that is not below the number.

    >>> [ladder_step(n) for n in (1, 3, 5, 9, 13, 100)]
    [1, 3, 6, 12, 16, 128]
    """
    power = power_of_two(number)
    return power * 3 // 4 if power >= 4 and power * 3 // 4 >= number else power


def together(groups: Sequence[Batch], size: Size, count: int) -> Users:
    """The groups padded to one size, and empty users up to the count."""
    starts = range(0, len(groups) * size.rows, size.rows)
    batch, weights = laid_out(groups, starts, rows=count * size.rows, length=size.length)
    return Users(batch=batch, weights=weights, count=count)


def laid_out(
    groups: Sequence[Batch], starts: Sequence[int], *, rows: int, length: int
) -> tuple[dict[str, Tensor], Tensor]:
    """A batch of so many rows with each group's from its start on, and the weights of the rows."""
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
                # A padded row must be one that the model can read: a copy, with weight zero. A
                # copy of the user's own: what is not finite stays so, times zero, too.
                whole[start + len(part) : stop] = part[:1]
        batch[name] = whole
    device = next(iter(first.values())).device
    weights = torch.zeros(rows, dtype=torch.float64, device=device)
    for start, group in zip(starts, groups, strict=True):
        num_records = len(next(iter(group.values())))
        weights[start : start + num_records] = 1 / num_records
    return batch, weights


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below the number."""
    return 1 << (number - 1).bit_length()
