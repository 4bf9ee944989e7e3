"""Dictionaries of words, and the rule for words outside of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from userdp.data.encoding import WHOLE_TEXT
from userdp.data.record import Record
from userdp.data.store import UserStore, write_store
from userdp.data.tokens import TokenRows, tokenise, tokenizer_digest, tokens_per_record
from userdp.errors import InputError
from userdp.evaluation import evaluate, unknown_word
from userdp.models.words import most_frequent, word_tokenizer


class AlwaysUnknown(nn.Module):
    """Predicts the unknown word, token 0, whatever it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([5.0, 0.0, 0.0, 0.0, 1.0]))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.logits.expand(*input_ids.shape, 5)


def test_a_predicted_unknown_word_is_a_mistake() -> None:
    rows = TokenRows(
        tokens=np.array([1, 0, 4, 0, 2], dtype=np.int32),
        indptr=np.array([0, 5]),
        owners=np.array([0]),
        num_users=1,
    )
    model = AlwaysUnknown()
    assert evaluate(model, rows, pad_token=3).accuracy_top1 == 0.5
    assert evaluate(model, rows, pad_token=3, unknown=0).accuracy_top1 == 0.0


def test_only_a_token_of_its_own_is_the_unknown_word() -> None:
    assert unknown_word(word_tokenizer(["a"])) == 0
    # As in GPT-2, where the end of a text has that name, too.
    pieces = SimpleNamespace(bos_token_id=7, eos_token_id=7, pad_token_id=7, unk_token_id=7)
    assert unknown_word(pieces) is None


def test_the_dictionary_is_saved_and_loaded(tmp_path: Path) -> None:
    words = most_frequent(["The cat. The dog!", "a CAT"], 4)
    assert words == ["cat", "the", "!", "."]
    word_tokenizer(words).save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again("the bird.").input_ids == word_tokenizer(words)("the bird.").input_ids
    assert again.decode([4, 5]) == "cat the"


def test_training_reads_begin_and_end_of_every_text(tmp_path: Path) -> None:
    texts = ["the cat", "cat cat the"]
    records = [Record(text, (f"user {n}",), f"record {n}") for n, text in enumerate(texts)]
    write_store(records, tmp_path / "store", key=bytes(32))
    store = UserStore.open(tmp_path / "store")
    word_tokenizer(["the", "cat"]).save_pretrained(tmp_path / "words")
    # As `userdp train` reads it: from its directory.
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "words")
    rows = tokenise(store, tokenizer, sequence_length=4)
    begin, end, the, cat = 1, 2, 4, 5
    owned = {
        user: [rows.tokens[slice(*rows.indptr[row : row + 2])].tolist() for row in own]
        for user in range(2)
        if (own := np.flatnonzero(rows.owners == user)).size
    }
    # A row of the end alone predicts nothing.
    assert sorted(owned.values()) == [[[begin, the, cat, end]], [[begin, cat, cat, the]]]
    assert sorted(tokens_per_record(store, tokenizer)) == [4, 5]


def test_only_a_tokenizer_that_says_so_begins_texts(tmp_path: Path) -> None:
    says = word_tokenizer(["the", "cat"])
    silent = word_tokenizer(["the", "cat"])
    del silent.init_kwargs["begins_texts"]
    assert tokenizer_digest(says) != tokenizer_digest(silent)

    def tokens(tokenizer: object) -> list[int]:
        return WHOLE_TEXT.encode(["the cat"], "plain", tokenizer, 8).tokens.tolist()

    assert tokens(says) == [1, 4, 5, 2]
    assert tokens(silent) == [4, 5, 2]
    # A text without a word predicts nothing, whoever begins it.
    assert not WHOLE_TEXT.encode([" "], "plain", says, 8).tokens.size
    nameless = word_tokenizer(["the"])
    nameless.bos_token = None
    with pytest.raises(InputError, match="begins_texts and has no begin-of-text token"):
        WHOLE_TEXT.check("plain", nameless, 8)


def test_a_digest_follows_the_rows_of_a_tokenizer_and_nothing_else(tmp_path: Path) -> None:
    word_tokenizer(["cat", "<", ">", "/", "s"]).save_pretrained(tmp_path)
    usual, split, cut = (
        AutoTokenizer.from_pretrained(tmp_path, **given)
        for given in ({}, {"split_special_tokens": True}, {})
    )
    cut.backend_tokenizer.enable_truncation(2)
    cut.backend_tokenizer.enable_padding(length=9)
    digests = [tokenizer_digest(tokenizer) for tokenizer in (usual, split, cut)]
    rows = [
        WHOLE_TEXT.encode(["cat </s> cat"], "plain", tokenizer, 16).tokens.tolist()
        for tokenizer in (usual, split, cut)
    ]
    assert rows[0] == rows[2] != rows[1]
    assert digests[0] == digests[2] != digests[1]
    # A call changes the settings of the tokenizer that it is made with.
    assert [tokenizer_digest(tokenizer) for tokenizer in (usual, split, cut)] == digests


@pytest.mark.parametrize("words", [[], ["a", "a"], ["<unk>", "a"]])
def test_no_word_may_stand_for_two_things(words: list[str]) -> None:
    with pytest.raises(InputError, match="dictionary"):
        word_tokenizer(words)
