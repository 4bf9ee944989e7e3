"""Token rows: never two records in one, nothing lost, rebuilt when the tokenizer changes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tokenizers

import models_zoo
from userdp.data.record import Record
from userdp.data.store import UserStore
from userdp.data.tokens import TokenRows, tokenise
from userdp.errors import InputError

MakeStore = Callable[[list[Record]], UserStore]

RECORDS = [
    Record("w1 w2 w3", ("a",), "1"),
    Record(" ".join(["w4"] * 9), ("b",), "2"),
    Record("w5", ("a",), "3"),
    Record("w6 w7 w8 w9 w10", ("c",), "4"),
]


def row_lists(rows: TokenRows) -> list[list[int]]:
    return [rows.tokens[a:b].tolist() for a, b in pairwise(rows.indptr)]


def test_rows_never_mix_records_and_lose_no_token(make_store: MakeStore) -> None:
    tokenizer = models_zoo.word_tokenizer()
    rows = tokenise(make_store(RECORDS), tokenizer, sequence_length=4)
    # Word wN is token N + 1; 0 ends every record. The last row of b, a lone end, predicts nothing.
    assert row_lists(rows) == [
        [2, 3, 4, 0],
        [5, 5, 5, 5],
        [5, 5, 5, 5],
        [5, 0],
        [6, 0],
        [7, 8, 9, 10],
        [11, 0],
    ]
    assert rows.owners.tolist() == [0, 1, 1, 1, 0, 2, 2]
    index = rows.index()
    assert [index.rows_of(user).tolist() for user in range(3)] == [[0, 4], [1, 2, 3], [5, 6]]


def test_row_of_a_single_token_is_left_out(make_store: MakeStore) -> None:
    store = make_store([Record("w1 w2 w3 w4", ("a",), "1"), Record("w5", ("b",), "2")])
    rows = tokenise(store, models_zoo.word_tokenizer(), sequence_length=4)
    assert row_lists(rows) == [[2, 3, 4, 5], [6, 0]]


def test_padding_stands_on_the_right_and_has_no_label(make_store: MakeStore) -> None:
    rows = tokenise(make_store(RECORDS), models_zoo.word_tokenizer(), sequence_length=8)
    ids, labels = rows.padded(np.array([0, 3]), pad_token=0)
    assert ids.tolist() == [[2, 3, 4, 0], [6, 0, 0, 0]]
    assert labels.tolist() == [[2, 3, 4, 0], [6, 0, -100, -100]]


def test_cache_is_used_again_and_rebuilt_when_anything_changes(make_store: MakeStore) -> None:
    store = make_store(RECORDS)
    calls: list[int] = []

    class Counted:
        """A tokenizer that tells when it is asked."""

        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def __call__(self, *arguments: Any, **options: Any) -> Any:
            calls.append(1)
            return self._inner(*arguments, **options)

    first = tokenise(store, Counted(models_zoo.word_tokenizer()), sequence_length=4)
    made = len(calls)
    again = tokenise(store, Counted(models_zoo.word_tokenizer()), sequence_length=4)
    assert len(calls) == made
    assert row_lists(again) == row_lists(first)
    other = tokenise(
        store, Counted(models_zoo.word_tokenizer(models_zoo.WORDS[::-1])), sequence_length=4
    )
    assert len(calls) > made
    assert row_lists(other) != row_lists(first)
    made = len(calls)
    tokenise(store, Counted(models_zoo.word_tokenizer()), sequence_length=5)
    assert len(calls) > made


def test_user_whose_text_has_no_token_keeps_a_place_without_rows(make_store: MakeStore) -> None:
    tokenizer = models_zoo.word_tokenizer()
    tokenizer.backend_tokenizer.normalizer = tokenizers.normalizers.Replace("\u200b", "")
    store = make_store([Record("w1 w2", ("a",), "1"), Record("\u200b", ("b",), "2")])
    rows = tokenise(store, tokenizer, sequence_length=4)
    index = rows.index()
    assert [index.rows_of(user).tolist() for user in range(2)] == [[0], []]


def test_store_without_any_token_is_refused(make_store: MakeStore) -> None:
    tokenizer = models_zoo.word_tokenizer()
    tokenizer.backend_tokenizer.normalizer = tokenizers.normalizers.Replace("\u200b", "")
    with pytest.raises(InputError, match="no record has a token"):
        tokenise(make_store([Record("\u200b", ("b",), "2")]), tokenizer, sequence_length=4)


@pytest.mark.parametrize("length", [1, 0, -4])
def test_sequence_length_below_two_is_refused(make_store: MakeStore, length: int) -> None:
    with pytest.raises(InputError, match="sequence_length"):
        tokenise(make_store(RECORDS), models_zoo.word_tokenizer(), sequence_length=length)


def test_tokenizer_without_end_token_is_refused(make_store: MakeStore) -> None:
    tokenizer = models_zoo.word_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(InputError, match="end-of-text"):
        tokenise(make_store(RECORDS), tokenizer, sequence_length=4)
