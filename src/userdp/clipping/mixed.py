"""Users of unlike size in batches of few shapes: each user has a run of rows, as many as it needs.

Compiled steps want shapes that come back. A batch of such a shape has a fixed number of rows of one
length, and of places for users; whose rows are whose is data, not shape. Groups are put into
batches largest first, the smaller ones into what is left, so that rows without a record are rare.
Only a cohort's last batch is smaller than the others.

Users of at most 512 tokens, of at most 1,024, and so on go into batches of their own kind: how many
places there must be and which form of a gradient is cheapest (`forms`) differ. Smaller users fill
up batches of larger, in a shape with more places where these would run out. Users with the most
rows of all, often as many as the sampler admits, share batches where all have equally many: the
fastest ones.

Secret: everything here but the budget.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from userdp.clipping.pack import (
    Rest,
    Runs,
    Size,
    Users,
    laid_out,
    power_of_two,
    size_of,
    together,
)
from userdp.losses import Batch

# The most tokens of a user in batches of the first kind; in each further kind twice as many.
FIRST_KIND = 512
# Of a batch's rows, what batches at the end of a cohort may have, smallest first.
SMALLER = (1 / 8, 1 / 4, 1 / 2, 3 / 4)
# Of a batch's rows, what users have in a batch that is not made for more and smaller ones.
FULL_ENOUGH = 0.9
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


@dataclass(kw_only=True)
class Sizes:
    """What batches have to hold. Grows with what is seen, so that shapes settle."""

    max_tokens: int
    # In a batch: as many as memory has room for. Users of the first kind may be held as pairs, and
    # then need none.
    max_users: int | None = None
    max_short_users: int | None = None
    # Of a row: what the model has positions for.
    max_length: int | None = None
    longest: int = 0
    most_seen: int = 1

    def see(self, groups: Sequence[Batch]) -> None:
        """Take note of the groups' longest row and of the most rows."""
        for group in groups:
            size = size_of(group)
            aligned = -(-size.length // ALIGNMENT) * ALIGNMENT
            if self.max_length is not None and aligned > self.max_length:
                aligned = size.length
            self.longest = max(self.longest, aligned)
            self.most_seen = max(self.most_seen, size.rows)

    def holds(self, group: Batch) -> bool:
        """Whether the group fits into a batch."""
        size = size_of(group)
        return size.rows * self.length(size) <= self.max_tokens

    def length(self, size: Size) -> int:
        """The row length of batches for groups of this size."""
        if size.length <= 1:
            return 1
        return min(max(SHORTEST_ROW, power_of_two(size.length)), self.longest)

    def most_users(self, tokens: int) -> int | None:
        """How many users of so many tokens may share a batch."""
        return self.max_users if tokens > FIRST_KIND else self.max_short_users

    def shape(self, rows: int, length: int, share: float = 1.0, *, crowded: bool = False) -> Shape:
        """The batch, or a share of it, for a user of so many rows of this length, and its like.

        A `crowded` one has places for twice as many, most of them smaller.
        """
        tokens = rows * length
        upper = max(FIRST_KIND, power_of_two(tokens))
        lower = upper // 2 if upper > FIRST_KIND else 0
        fewest = lower // length + 1
        if crowded:
            fewest = max(1, fewest // 2)
        most = min(upper // length, power_of_two(self.most_seen))
        all_rows = max(1, int(self.max_tokens // length * share))
        users = max(1, all_rows // fewest)
        limit = self.most_users(tokens)
        if limit is not None:
            users = min(users, limit)
        return Shape(
            rows=min(all_rows, users * most),
            length=length,
            # One place more: the rows that nobody needs must be somewhere.
            users=users + 1,
            fewest_rows=fewest,
            most_rows=most,
        )


def pack_runs(groups: Sequence[Batch], sizes: Sizes) -> Iterator[Users]:
    """Batches that hold all the groups, each of which `sizes` says to fit."""
    sizes.see(groups)
    by_rest: dict[Rest, list[Batch]] = {}
    for group in groups:
        by_rest.setdefault(size_of(group).rest, []).append(group)
    for alike in by_rest.values():
        yield from _pack(alike, sizes)


def _pack(groups: Sequence[Batch], sizes: Sizes) -> Iterator[Users]:
    waiting = _Waiting(groups, sizes)
    for alike, size in waiting.take_alike(sizes):
        yield together([groups[i] for i in alike], size, len(alike))
    while (largest := waiting.largest()) is not None:
        length, rows = largest
        shape, crowded = sizes.shape(rows, length), False
        chosen, used = waiting.fitting(shape)
        if len(chosen) < len(waiting) and used < FULL_ENOUGH * shape.rows:
            # Places have run out before rows: too few users are of the size of the largest.
            shape, crowded = sizes.shape(rows, length, crowded=True), True
            chosen, used = waiting.fitting(shape)
        waiting.remove(chosen)
        smaller = (sizes.shape(rows, length, share, crowded=crowded) for share in SMALLER)
        holding = (s for s in smaller if s.rows >= used and _has_places(s, len(chosen), used))
        yield _filled([groups[i] for i in sorted(chosen)], next(holding, shape))


class _Waiting:
    """Groups that are in no batch yet, by the length of their rows and by rows."""

    def __init__(self, groups: Sequence[Batch], sizes: Sizes) -> None:
        self._places: dict[tuple[int, int], list[int]] = {}
        for place, group in enumerate(groups):
            size = size_of(group)
            self._places.setdefault((sizes.length(size), size.rows), []).append(place)

    def largest(self) -> tuple[int, int] | None:
        """Length and rows of the group to begin a batch with."""
        return max(self._places, default=None)

    def take_alike(self, sizes: Sizes) -> Iterator[tuple[list[int], Size]]:
        """Full batches of groups with the most rows of all, and what each is padded to."""
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

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def fitting(self, shape: Shape) -> tuple[list[int], int]:
        """Groups for a batch of this shape, and the rows that they take."""
        chosen: list[int] = []
        used = 0
        # Longer rows first: a shorter one is padded there.
        for length, rows in sorted(self._places, reverse=True):
            for place in reversed(self._places[length, rows]):
                if (
                    # Of shorter rows a user may have more than those that the batch is made for.
                    rows > shape.most_rows
                    or used + rows > shape.rows
                    or not _has_places(shape, len(chosen) + 1, used + rows)
                ):
                    break
                chosen.append(place)
                used += rows
        return chosen, used

    def remove(self, chosen: Sequence[int]) -> None:
        """These groups have a batch."""
        gone = set(chosen)
        left = {
            size: [place for place in places if place not in gone]
            for size, places in self._places.items()
        }
        self._places = {size: places for size, places in left.items() if places}


def _has_places(shape: Shape, users: int, used: int) -> bool:
    """Whether the users, and the rows that nobody uses, find places."""
    empty = -(-(shape.rows - used) // shape.most_rows)
    return users + empty <= shape.users


def _filled(groups: Sequence[Batch], shape: Shape) -> Users:
    """The groups one after the other; rows without a record have no label and weigh nothing."""
    counts = [size_of(group).rows for group in groups]
    starts = [0, *itertools.accumulate(counts)]
    batch, weights = laid_out(groups, starts[:-1], rows=shape.rows, length=shape.length)
    full, rest = divmod(shape.rows - starts[-1], shape.most_rows)
    counts += [shape.most_rows] * full + [rest] * (rest > 0)
    counts += [0] * (shape.users - len(counts))
    rows_of_user = torch.tensor(counts)
    runs = Runs(
        starts=F.pad(rows_of_user.cumsum(0), (1, 0)).to(torch.int32),
        user_of_row=torch.repeat_interleave(torch.arange(shape.users), rows_of_user),
        most_rows=shape.most_rows,
        fewest_rows=shape.fewest_rows,
    )
    return Users(batch=batch, weights=weights, count=shape.users, runs=runs)
