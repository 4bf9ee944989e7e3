"""Dictionaries of words, and the rule for words outside of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from userdp.data.tokens import TokenRows
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


@pytest.mark.parametrize("words", [[], ["a", "a"], ["<unk>", "a"]])
def test_no_word_may_stand_for_two_things(words: list[str]) -> None:
    with pytest.raises(InputError, match="dictionary"):
        word_tokenizer(words)
