"""Batches in which users have different numbers of rows, so that few batch shapes are needed.

Captured steps need the same shapes again and again. A ragged batch has a fixed number of rows, a
fixed row length and a fixed number of places for users. Whose rows are whose is data, not shape.

Groups are put into batches from the largest to the smallest. The smaller ones fill the rows that
the larger ones leave, so few rows stay without a record. Only the last batch of a cohort is smaller
than the others.

Users are sorted into kinds by their tokens: up to 512, up to 2,048, and so on. Each kind has its
own batches, because the number of places and the cheapest form of a gradient (`forms`) depend on
the size of the users. If a kind has too few users to fill a batch, smaller users fill it up, and
the last few users of a cohort stay with the kind before. A full
batch has places for twice as many users as the smallest ones of the kind would need, and a large
one for one and a half times as many. Smaller batches have a place for every third of the rows that
the smallest users have, but no more places than the full batch, for which there is memory.

Unless records are joined, many users often have the largest number of rows, because the sampler
allows no more. They share batches in which all have the same number of rows: those run fastest.

Secret: everything here but the budget.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from userdp.clipping.batches.joined_records import is_joined
from userdp.clipping.batches.users import (
    Rest,
    RowRanges,
    Size,
    Users,
    laid_out,
    padded_together,
    power_of_two,
    size_of,
)
from userdp.losses import Batch

# The most tokens of a user of the first kind, and how many times as many the next kind allows. With
# few kinds there are few batch shapes; each has to be captured, and compared with the plain loop.
FIRST_KIND = 512
NEXT_KIND = 4
# The last batch of a cohort may have any number of eighths of a full batch's rows, or of sixteenths
# where a full batch has more tokens than this. Up to half a batch there are twice as many parts:
# the rows that stay empty are a larger share of a small batch. More parts would leave fewer rows
# empty, and each number of rows has to be captured.
MANY_TOKENS = 16_384
FEW_PARTS, MANY_PARTS = 8, 16
SHORTEST_ROW = 16
ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Rows of a batch and their length, places for users, and how many rows such users have."""

    rows: int
    length: int
    users: int
    fewest_rows: int
    most_rows: int
    full_rows: int


@dataclass(kw_only=True)
class Sizes:
    """What batches have to hold. The sizes grow with what is seen and then stay the same."""

    max_tokens: int
    # How many users' stored gradients fit into memory. Users of the first kind have a limit of
    # their own: they are usually held as pairs, which need no such memory.
    max_users: int | None = None
    max_short_users: int | None = None
    # The longest row that the model has positions for.
    max_length: int | None = None
    longest: int = 0
    most_seen: int = 1

    def see(self, groups: Sequence[Batch]) -> None:
        """Take note of the longest row and of the largest number of rows."""
        for group in groups:
            size = size_of(group)
            self.see_length(size.length)
            self.most_seen = max(self.most_seen, size.rows)

    def see_length(self, length: int) -> None:
        """Take note of a row that is this long."""
        aligned = -(-length // ALIGNMENT) * ALIGNMENT
        if self.max_length is not None and aligned > self.max_length:
            aligned = length
        self.longest = max(self.longest, aligned)

    def holds(self, group: Batch) -> bool:
        """Whether the group fits into a batch."""
        size = size_of(group)
        return size.rows * self.length(size) <= self.max_tokens

    def length(self, size: Size) -> int:
        """The row length of batches for groups of this size."""
        if size.length <= 1:
            return 1
        length = min(max(SHORTEST_ROW, power_of_two(size.length)), self.longest)
        # Rows of joined records may be longer than the model has positions for; others may not.
        most = max(size.length, self.max_length or length)
        return min(length, most)

    def most_users(self, tokens: int) -> int | None:
        """How many users of this many tokens may share a batch."""
        return self.max_users if tokens > FIRST_KIND else self.max_short_users

    @property
    def shares(self) -> list[float]:
        """Which parts of a full batch there are, the smallest first."""
        parts = MANY_PARTS if self.max_tokens > MANY_TOKENS else FEW_PARTS
        small = [part / (2 * parts) for part in range(1, parts)]
        return [*small, *(part / parts for part in range(parts // 2, parts))]

    def shape(self, rows: int, length: int, share: float = 1.0) -> Shape:
        """The batch, or a share of it, for users of about `rows` rows of this length."""
        tokens = rows * length
        upper = FIRST_KIND
        while upper < tokens:
            upper *= NEXT_KIND
        lower = upper // NEXT_KIND if upper > FIRST_KIND else 0
        fewest = lower // length + 1
        most = max(1, min(upper, self.max_tokens) // length)
        full_rows = max(1, self.max_tokens // length)
        all_rows = max(1, int(full_rows * share))
        # Fewer rows than the smallest number: smaller users may come in. In a large batch they come
        # less often, and its places need more memory.
        each = fewest * 2 // 3 if self.max_tokens > MANY_TOKENS else fewest // 2
        users = min(full_rows // max(1, each), all_rows // max(1, fewest // 3))
        users = max(1, users)
        limit = self.most_users(tokens)
        if limit is not None:
            users = min(users, limit)
        return Shape(
            rows=min(all_rows, users * most),
            length=length,
            # One more place, for the rows that no user needs.
            users=users + 1,
            fewest_rows=fewest,
            most_rows=most,
            full_rows=full_rows,
        )


def pack_ragged(groups: Sequence[Batch], sizes: Sizes) -> Iterator[Users]:
    """Batches that hold all the groups; each group must fit (`sizes.holds`)."""
    sizes.see(groups)
    by_rest: dict[Rest, list[Batch]] = {}
    for group in groups:
        by_rest.setdefault(size_of(group).rest, []).append(group)
    for alike in by_rest.values():
        yield from _pack(alike, sizes)


def _pack(groups: Sequence[Batch], sizes: Sizes) -> Iterator[Users]:
    waiting = _Waiting(groups, sizes)
    if not is_joined(groups[0]):
        for alike, size in waiting.take_alike(sizes):
            yield padded_together([groups[i] for i in alike], size, len(alike))
    shape: Shape | None = None
    while (largest := waiting.largest()) is not None:
        length, rows = largest
        # The last batch of a cohort stays with the kind before, if that holds all who are left. A
        # kind that only they have would have to be compiled for them.
        if shape is None or shape.length != length or not waiting.all_fit(shape):
            shape = sizes.shape(rows, length)
        chosen, used = waiting.fitting(shape)
        waiting.remove(chosen)
        smaller = (sizes.shape(shape.most_rows, length, share) for share in sizes.shares)
        holding = (s for s in smaller if s.rows >= used and _has_places(s, len(chosen), used))
        yield _filled([groups[i] for i in sorted(chosen)], next(holding, shape))


class _Waiting:
    """Groups that are in no batch yet, by row length and number of rows."""

    def __init__(self, groups: Sequence[Batch], sizes: Sizes) -> None:
        self._places: dict[tuple[int, int], list[int]] = {}
        for place, group in enumerate(groups):
            size = size_of(group)
            self._places.setdefault((sizes.length(size), size.rows), []).append(place)

    def largest(self) -> tuple[int, int] | None:
        """Row length and number of rows of the group to begin a batch with."""
        return max(self._places, default=None)

    def take_alike(self, sizes: Sizes) -> Iterator[tuple[list[int], Size]]:
        """Full batches of the groups with the most rows of all, and the size of each group."""
        for length, rows in list(self._places):
            places = self._places[length, rows]
            count = sizes.max_tokens // (length * rows)
            full = rows == sizes.most_seen and count > 1
            full &= (count * rows + 1) * length > sizes.max_tokens
            limit = sizes.most_users(length * rows)
            full &= limit is None or count <= limit
            while full and len(places) >= count:
                alike = [places.pop() for _ in range(count)]
                yield alike, Size(rows=rows, length=length)
            if not places:
                del self._places[length, rows]

    def fitting(self, shape: Shape) -> tuple[list[int], int]:
        """Groups for a batch of this shape, and how many rows they take."""
        chosen: list[int] = []
        used = 0
        # Longer rows first. Shorter ones are padded to the batch's length.
        for length, rows in sorted(self._places, reverse=True):
            for place in reversed(self._places[length, rows]):
                if (
                    # A user with shorter rows may have more of them than the shape allows.
                    rows > shape.most_rows
                    or used + rows > shape.rows
                    or not _has_places(shape, len(chosen) + 1, used + rows)
                ):
                    break
                chosen.append(place)
                used += rows
        return chosen, used

    def all_fit(self, shape: Shape) -> bool:
        """Whether one batch of this shape holds all groups."""
        return len(self.fitting(shape)[0]) == sum(map(len, self._places.values()))

    def remove(self, chosen: Sequence[int]) -> None:
        """Forget these groups: they have a batch."""
        gone = set(chosen)
        left = {
            size: [place for place in places if place not in gone]
            for size, places in self._places.items()
        }
        self._places = {size: places for size, places in left.items() if places}


def _has_places(shape: Shape, users: int, used: int) -> bool:
    """Whether there are places for the users and for the rows that no user needs."""
    empty = -(-(shape.rows - used) // shape.most_rows)
    return users + empty <= shape.users


def _filled(groups: Sequence[Batch], shape: Shape) -> Users:
    """The groups one after the other; rows without a record have no label and weigh nothing."""
    counts = [size_of(group).rows for group in groups]
    starts = [0, *itertools.accumulate(counts)]
    batch, weights = laid_out(groups, starts[:-1], rows=shape.rows, length=shape.length)
    padding, free = shape.rows - starts[-1], shape.users - len(groups)
    # Small users are pairs, which cost the square of a place's rows: padding has many places. What
    # is stored costs the same for a place of few rows.
    is_small = shape.fewest_rows == 1
    each = max(1, -(-padding // free)) if is_small and free else shape.most_rows
    full, rest = divmod(padding, each)
    counts += [each] * full + [rest] * (rest > 0)
    counts += [0] * (shape.users - len(counts))
    rows_of_user = torch.tensor(counts)
    row_starts = F.pad(rows_of_user.cumsum(0), (1, 0)).to(torch.int32)
    ranges = RowRanges(
        starts=row_starts,
        user_starts=row_starts.clamp(max=starts[-1]),
        user_of_row=torch.repeat_interleave(torch.arange(shape.users), rows_of_user),
        most_rows=shape.most_rows,
        fewest_rows=shape.fewest_rows,
        full_rows=shape.full_rows,
    )
    return Users(batch=batch, weights=weights, count=shape.users, ranges=ranges)
