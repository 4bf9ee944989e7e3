"""The rows of a selection: each record once, its own first tokens and nobody else's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

import models_zoo
from userdp.data.record import Record
from userdp.data.store import UserStore
from userdp.data.tokens import tokenise_selected

LENGTH = 4
# Records of one to three rows, of two owners in turn; the last one has two owners.
WORDS = [3, 9, 2, 6, 11, 3]


@pytest.mark.parametrize("records", [[0, 1, 2, 3, 4, 5], [1, 4], [4, 4, 1], [5]], ids=str)
def test_selected_row_is_the_beginning_of_its_record_alone(
    records: list[int], make_store: Callable[[list[Record]], UserStore]
) -> None:
    texts = [" ".join(models_zoo.WORDS[i] for i in range(3, 3 + count)) for count in WORDS]
    owners = [("ann",), ("bob",), ("ann",), ("bob",), ("ann",), ("ann", "bob")]
    store = make_store(
        [
            Record(text, own, f"line {number}")
            for number, (text, own) in enumerate(zip(texts, owners, strict=True))
        ]
    )
    tokenizer = models_zoo.word_tokenizer()
    rows = tokenise_selected(store, tokenizer, np.array(records), sequence_length=LENGTH)
    found = [rows.tokens[a:b].tolist() for a, b in pairwise(rows.indptr)]
    # Tokenised here, one text at a time.
    closed = [
        [*tokenizer(texts[record], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        for record in records
    ]
    assert found == [tokens[:LENGTH] for tokens in closed]
    # The bound counts records: a long one is one row all the same.
    assert len(rows) == len(records)
