"""Who takes part when, dealt once for a whole run or round: found by step in O(cohort).

Some samplers decide beforehand at which steps each user takes part. The decision is a function of
the run's streams, so that any process makes the same one. It takes time in proportion to the number
of users, so the last few decisions are remembered. A remembered one is as secret as the index.

Each user's places are drawn independently of all other users, from the same law. So adding a user
changes nobody else's chances.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from userdp.index import Rows, indptr_of
from userdp.sampling.draws import equally_many
from userdp.streams import Streams

# Smaller integers where they suffice: there is one card for every user.
Cards = NDArray[np.int64] | NDArray[np.uint32]

# The piece of a stream that deals. Piece 0 of a step chooses among the rows of who takes part.
DEALING = 1

# How many decisions are remembered. A run needs one at a time, and a second one at a round's turn.
_MOST_REMEMBERED = 2
_remembered: dict[Hashable, Dealt] = {}
_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """`cards[indptr[p]:indptr[p + 1]]` lie at place p: users, or rows. Secret.

    `of` is what the decision was made for. It is kept, so that its identity belongs to nothing
    else as long as the decision is remembered.
    """

    indptr: Rows
    cards: Cards
    of: object = None

    def __repr__(self) -> str:
        return "Dealt(<secret>)"

    def at(self, place: int) -> Cards:
        """The users, or rows, at one place, in ascending order. Nothing is copied."""
        return self.cards[self.indptr[place] : self.indptr[place + 1]]


def one_place_each(streams: Streams, number: int, *, num_users: int, places: int) -> Dealt:
    """Every user at one of `places` places, all equally likely; the deal of this `number`."""

    def deal() -> Dealt:
        rng = streams.rng(number, DEALING)
        return by_place(rng.integers(places, size=num_users), places)

    return remembered(("one place", streams.key(number, DEALING), num_users, places), deal)


def places_each(streams: Streams, *, num_users: int, places: int, most: int) -> Dealt:
    """Every user at exactly `most` of `places` places; all sets of places are equally likely."""

    def deal() -> Dealt:
        rng = streams.rng(0, DEALING)
        found = equally_many(num_users, places, most, rng)
        return by_place(found.reshape(-1), places, each=most)

    return remembered(("places", streams.key(0, DEALING), num_users, places, most), deal)


def by_place(place_of_card: Rows, places: int, *, each: int = 1) -> Dealt:
    """The cards at every place. `each` entries in a row belong to the same card.

    >>> dealt = by_place(np.array([1, 0, 1]), 2)
    >>> dealt.at(0).tolist(), dealt.at(1).tolist()
    ([1], [0, 2])
    """
    # Sorting is several times faster for small integers.
    kind = np.uint16 if places <= 2**16 else np.int64
    order = np.argsort(place_of_card.astype(kind), kind="stable") // each
    cards = order.astype(np.uint32) if len(order) <= 2**32 else order
    counts = np.bincount(place_of_card, minlength=places)
    return Dealt(indptr=indptr_of(counts), cards=cards)


def remembered(key: Hashable, make: Callable[[], Dealt]) -> Dealt:
    """What `make` gave when it was last asked for under this key, or gives now."""
    with _lock:
        found = _remembered.pop(key, None)
        if found is None:
            found = make()
        while len(_remembered) >= _MOST_REMEMBERED:
            del _remembered[next(iter(_remembered))]
        _remembered[key] = found
        return found
