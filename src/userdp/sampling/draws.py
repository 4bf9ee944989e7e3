"""How samplers draw: coins for many places, and a few rows of each user, without a loop over users.

Every function is exact in distribution and takes time in proportion to what it returns, not to the
number of users. All randomness comes from the generator that is given.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from userdp.errors import InputError
from userdp.index import Rows, UserIndex, indptr_of, ranges
from userdp.sampling.cohort import Cohort
from userdp.streams import Streams

# Above this rate, one number a place costs less than the gaps between those who take part.
_DENSE = 0.1


def poisson(count: int, prob: float, rng: np.random.Generator) -> Rows:
    """Which of `count` places take part, each by a coin of its own that says yes with `prob`.

    The gaps between the places that take part are independent and geometric, so it is enough to
    draw the gaps.

    >>> poisson(3, 1.0, np.random.default_rng(0)).tolist()
    [0, 1, 2]
    """
    if prob >= 1:
        return np.arange(count)
    if prob > _DENSE:
        return np.flatnonzero(rng.random(count) < prob)
    found: list[Rows] = []
    last = -1
    while True:
        expected = (count - 1 - last) * prob
        gaps = rng.geometric(prob, size=int(expected + 5 * math.sqrt(expected)) + 8)
        # A gap that leads beyond the end is cut, because the sum of such gaps could overflow.
        places = last + np.cumsum(np.minimum(gaps, count + 1))
        inside = places[: int(np.searchsorted(places, count))]
        found.append(inside)
        if len(inside) < len(places):
            return np.concatenate(found)
        last = int(places[-1])


def distinct(counts: Rows, sizes: Rows, rng: np.random.Generator) -> Rows:
    """For each i, `sizes[i]` different numbers below `counts[i]`; all such sets are equally likely.

    The numbers of each i ascend, and the sets stand one after another.

    Numbers that came twice are drawn again until all are different. No step of this prefers a
    number to another one. So relabelling the numbers does not change the law of the resulting set,
    and every set of that size is equally likely. Where more than half are to be taken, those that
    are left out are drawn: then a new number is different with a chance of at least one half.

    >>> distinct(np.array([3, 5]), np.array([3, 0]), np.random.default_rng(0)).tolist()
    [0, 1, 2]
    """
    is_kept = sizes <= counts - sizes
    drawn = _different(counts, np.where(is_kept, sizes, counts - sizes), rng)
    stride = _stride(counts)
    if is_kept.all():
        return drawn % stride
    mostly = np.flatnonzero(~is_kept)
    every = ranges(mostly * stride, counts[mostly])
    by_keeping = is_kept[drawn // stride]
    kept = every[~np.isin(every, drawn[~by_keeping], assume_unique=True)]
    return np.sort(np.concatenate([drawn[by_keeping], kept])) % stride


def equally_many(owners: int, count: int, size: int, rng: np.random.Generator) -> Rows:
    """One line an owner: `size` different numbers below `count`; all sets are equally likely.

    This is `distinct` where all have the same count and size, and several times faster for many
    owners.
    """
    if size > count - size:
        is_taken = np.ones((owners, count), dtype=bool)
        np.put_along_axis(is_taken, equally_many(owners, count, count - size, rng), False, axis=1)
        return np.nonzero(is_taken)[1].reshape(owners, size)
    found = np.sort(rng.integers(count, size=(owners, size)), axis=1)
    unfinished = np.arange(owners)
    while len(unfinished):
        lines = found[unfinished]
        is_repeated = np.zeros(lines.shape, dtype=bool)
        is_repeated[:, 1:] = lines[:, 1:] == lines[:, :-1]
        is_short = is_repeated.any(axis=1)
        unfinished, lines, is_repeated = (
            array[is_short] for array in (unfinished, lines, is_repeated)
        )
        lines[is_repeated] = rng.integers(count, size=int(is_repeated.sum()))
        found[unfinished] = np.sort(lines, axis=1)
    return found


def rows_of_users(
    index: UserIndex, users: NDArray[Any], most: int, rng: np.random.Generator
) -> Cohort:
    """One group for each of `users`: the user's rows, or `most` of them without replacement."""
    users = users.astype(np.int64, copy=False)
    starts = index.indptr[users]
    counts = index.indptr[users + 1] - starts
    sizes = np.minimum(counts, most)
    offsets = ranges(0, sizes)
    is_large = counts > most
    if is_large.any():
        offsets[np.repeat(is_large, sizes)] = distinct(counts[is_large], sizes[is_large], rng)
    rows = index.rows[np.repeat(starts, sizes) + offsets]
    return Cohort(indptr=indptr_of(sizes), rows=rows)


def at_most_each(index: UserIndex, most: int, streams: Streams) -> UserIndex:
    """The index in which every user has at most `most` rows, chosen once and for all."""
    kept = rows_of_users(index, np.arange(index.num_users), most, streams.rng(0))
    return UserIndex(indptr=kept.indptr, rows=kept.rows)


def check_limited(index: UserIndex, most: int) -> None:
    """Refuse an index in which a user has more than `most` rows."""
    if index.widest > most:
        raise InputError(
            f"a user has {index.widest} rows and group_size={most}: the accounting would not cover "
            "that user. Call limit_contributions first."
        )


def _stride(counts: Rows) -> int:
    return int(counts.max(initial=1))


def _different(counts: Rows, sizes: Rows, rng: np.random.Generator) -> NDArray[np.int64]:
    """`distinct`, where no size is more than half of its count; as keys i * stride + number."""
    stride = _stride(counts)
    done: list[Rows] = []
    unfinished = np.flatnonzero(sizes)
    keys = np.empty(0, dtype=np.int64)
    missing = sizes[unfinished]
    while len(unfinished):
        owner = np.repeat(unfinished, missing)
        keys = np.unique(np.concatenate([keys, owner * stride + rng.integers(0, counts[owner])]))
        owner_of_key = keys // stride
        # `keys` ascend, so a search says how many each has by now.
        have = np.searchsorted(owner_of_key, unfinished, side="right") - np.searchsorted(
            owner_of_key, unfinished
        )
        is_short = have < sizes[unfinished]
        again = np.repeat(is_short, have)
        done.append(keys[~again])
        keys = keys[again]
        missing = (sizes[unfinished] - have)[is_short]
        unfinished = unfinished[is_short]
    return np.sort(np.concatenate(done)) if done else keys
