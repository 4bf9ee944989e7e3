"""Batches in which every user has the same number of rows: users of similar size share one.

A group smaller than the largest of its batch is padded to that size. Where steps are captured, the
same batch shapes should come back. Then rows, lengths and the number of users are rounded up to a
short list of numbers (a ladder), and groups left over from one size move to the next larger one.

Secret: everything here but the budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from userdp.clipping.batches.users import Size, Users, padded_together, power_of_two, size_of
from userdp.losses import Batch

# Without a ladder a group is padded to at most this many times its own tokens.
MOST_PADDING = 1.5


def pack_equal(
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
            yield padded_together([groups[i] for i in places[start : start + limit]], size, limit)
        left = places[full:]
        larger = next((other for other in waiting[position + 1 :] if other.holds(size)), None)
        if larger is not None and larger.tokens <= max_tokens:
            # Without capture a step costs what its tokens cost, so padding is limited.
            most = math.inf if ladder else MOST_PADDING
            moved = [i for i in left if larger.tokens <= most * size_of(groups[i]).tokens]
            members[larger] += moved
            left = [i for i in left if i not in moved]
        if left:
            count = min(limit, ladder_step(len(left))) if ladder else len(left)
            yield padded_together([groups[i] for i in left], size, count)


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
