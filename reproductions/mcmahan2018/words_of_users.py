"""Users with the same number of words each, as the paper prepares them (App. B).

Users of fewer words are dropped, and of every other user the first so many words are kept. The
dictionary comes from public books. A user's words are cut into records of `unroll` words, which
local training takes in batches.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from userdp.data.tokens import TokenRows
from userdp.errors import InputError
from userdp.models.words import most_frequent, word_tokenizer

# Public text for the dictionary. The longest books would only repeat its most frequent words.
_CHARACTERS_OF_A_BOOK = 100_000


@dataclass(frozen=True, kw_only=True)
class WordsOfUsers:
    """Rows of training and held-out users, and the tokenizer of the dictionary."""

    training: TokenRows
    held_out: TokenRows
    tokenizer: Any


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def load(
    data: Path, name: str, *, dictionary: int, words_per_user: int, unroll: int, seed: int = 0
) -> WordsOfUsers:
    """The users of one set; a fifth of them is held out, the same for every seed of training."""
    books = (
        line["text"][:_CHARACTERS_OF_A_BOOK] for line in lines(data / "pretrain_books.jsonl.gz")
    )
    tokenizer = word_tokenizer(most_frequent(books, dictionary - 4))
    texts: dict[str, list[str]] = {}
    for line in lines(data / f"{name}.jsonl.gz"):
        texts.setdefault(line["users"][0], []).append(line["text"])
    kept: list[np.ndarray] = []
    for user in sorted(texts):
        ids = [token for text in texts[user] for token in tokenizer(text).input_ids]
        if len(ids) >= words_per_user:
            kept.append(np.array(ids[:words_per_user], dtype=np.int32))
    if len(kept) < 10:
        raise InputError(f"{name}: only {len(kept)} users have {words_per_user} words.")
    order = np.random.default_rng(seed).permutation(len(kept))
    held_out = len(kept) // 5
    return WordsOfUsers(
        training=_rows([kept[i] for i in order[held_out:]], unroll),
        held_out=_rows([kept[i] for i in order[:held_out]], unroll),
        tokenizer=tokenizer,
    )


def _rows(users: list[np.ndarray], unroll: int) -> TokenRows:
    """Records of `unroll` + 1 words: the last word of one is the first of the next."""
    pieces, owners = [], []
    for number, ids in enumerate(users):
        for first in range(0, len(ids) - 1, unroll):
            pieces.append(ids[first : first + unroll + 1])
            owners.append(number)
    lengths = np.array([len(piece) for piece in pieces])
    return TokenRows(
        tokens=np.concatenate(pieces),
        indptr=np.concatenate([[0], np.cumsum(lengths)]),
        owners=np.array(owners),
        num_users=len(users),
    )
