"""How large batches are, if nobody says."""

from __future__ import annotations

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from userdp.clipping.batches.limits import (
    CUDA_TOKENS,
    LARGE_TOKENS,
    LEAST_ROOM,
    large_or_usual,
)


@pytest.mark.parametrize(
    ("words", "room", "expected"),
    [
        (64, LEAST_ROOM, LARGE_TOKENS),
        (64, LEAST_ROOM - 1, CUDA_TOKENS),
        # With so many words the logits of a large batch could not be counted in 32 bits.
        (52_429, 1_000 * LEAST_ROOM, CUDA_TOKENS),
    ],
)
def test_batches_are_large_where_there_is_room_and_logits_are_few(
    words: int, room: int, expected: int
) -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=2, n_head=1, vocab_size=words))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert large_or_usual(model, room * weights) == expected
