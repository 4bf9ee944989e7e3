"""How many users have each word among their own most frequent ones. Secret.

A user has one vote for each of at most so many words. Which words these are depends on the user's
own records alone: those that the user writes most often, and of equally frequent ones the first by
code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from userdp.data.contents import said_in
from userdp.data.store import UserStore

# Users whose texts are read together.
_AT_ONCE = 256


def votes_of_users(
    store: UserStore, split: Callable[[str], Sequence[str]], *, words_per_user: int
) -> dict[str, int]:
    """The number of users who vote for each word; `split` gives the words of a text."""
    votes: Counter[str] = Counter()
    for first in range(0, store.num_users, _AT_ONCE):
        users = np.arange(first, min(first + _AT_ONCE, store.num_users))
        indptr, records = store.records_of_users(users)
        texts = store.texts_of(records)
        for begin, end in pairwise(indptr.tolist()):
            own: Counter[str] = Counter()
            for text in texts[begin:end]:
                own.update(split(said_in(text, store.text_kind)))
            votes.update(most_frequent_words(own, words_per_user))
    return dict(votes)


def most_frequent_words(counts: Counter[str], count: int) -> list[str]:
    """At most `count` different words, the most frequent ones first.

    >>> most_frequent_words(Counter("abracadabra"), 3)
    ['a', 'b', 'r']
    """
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [word for word, _ in ranked[:count]]
