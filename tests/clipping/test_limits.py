"""How large batches are, if nobody says: it follows from public numbers."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from models_zoo import llama
from userdp.clipping.batches.limits import (
    CPU_LOGITS,
    CPU_TOKENS,
    CUDA_TOKENS,
    LARGE_TOKENS,
    LEAST_ROOM,
    large_or_usual,
    usual_tokens,
)
from userdp.clipping.gradients.word_lstm import dictionary_size
from userdp.models.word_lstm import WordLSTM, WordLSTMConfig


@pytest.mark.parametrize(
    ("words", "expected"),
    [(0, CPU_TOKENS), (100, CPU_TOKENS), (10_000, CPU_LOGITS // 10_000), (2 * CPU_LOGITS, 1)],
)
def test_a_large_dictionary_takes_smaller_batches_on_a_processor(words: int, expected: int) -> None:
    model = torch.nn.Linear(1, 1)
    assert usual_tokens(model, torch.device("cpu"), captured=False, words=words) == expected


def test_only_the_word_lstm_has_a_dictionary() -> None:
    config = WordLSTMConfig(vocab_size=31, embedding_size=4, state_size=4)
    assert dictionary_size(WordLSTM(config)) == 31
    assert dictionary_size(llama(tied=True)) == 0


@pytest.mark.parametrize(
    ("words", "room", "expected"),
    [
        (64, LEAST_ROOM, LARGE_TOKENS),
        (64, LEAST_ROOM - 1, CUDA_TOKENS),
        # With so many words the logits of a large batch could not be counted in 32 bits.
        (52_429, 1_000 * LEAST_ROOM, CUDA_TOKENS),
        # The head is filled up to a multiple of 64: 52,416 words fit, and the next are 52,480.
        (52_416, 1_000 * LEAST_ROOM, LARGE_TOKENS),
        (52_417, 1_000 * LEAST_ROOM, CUDA_TOKENS),
    ],
)
def test_batches_are_large_where_there_is_room_and_logits_are_few(
    words: int, room: int, expected: int
) -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=2, n_head=1, vocab_size=words))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert large_or_usual(model, room * weights) == expected
