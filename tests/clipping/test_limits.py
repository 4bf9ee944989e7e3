"""How large a batch may be follows from public numbers."""

from __future__ import annotations

import torch

from models_zoo import llama
from userdp.clipping.batches.limits import CPU_LOGITS, CPU_TOKENS, CUDA_TOKENS, usual_tokens
from userdp.clipping.gradients.word_lstm import dictionary_size
from userdp.models.word_lstm import WordLSTM, WordLSTMConfig


def test_a_large_dictionary_takes_smaller_batches_on_a_processor() -> None:
    cpu = torch.device("cpu")
    assert usual_tokens(cpu) == usual_tokens(cpu, 100) == CPU_TOKENS
    assert usual_tokens(cpu, 10_000) == CPU_LOGITS // 10_000 < CPU_TOKENS
    assert usual_tokens(cpu, 2 * CPU_LOGITS) == 1
    assert usual_tokens(torch.device("cuda"), 10_000) == CUDA_TOKENS


def test_only_the_word_lstm_has_a_dictionary() -> None:
    config = WordLSTMConfig(vocab_size=31, embedding_size=4, state_size=4)
    assert dictionary_size(WordLSTM(config)) == 31
    assert dictionary_size(llama(tied=True)) == 0
