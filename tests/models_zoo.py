"""Tiny language models built from a configuration, and ragged batches to feed them.

Every architecture here has once broken somebody's per-user gradient: a tied embedding is used
twice, GPT-2 broadcasts one line of position ids over the batch, grouped attention repeats keys,
LoRA sits beside a frozen weight, an LSTM applies one weight at every token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor, nn

from userdp.models.load import Lora, add_lora

VOCABULARY = 23
WORDS = tuple(f"w{number}" for number in range(VOCABULARY - 1))


class TiedLSTM(nn.Module):
    """A word-level LSTM whose output layer is its embedding (McMahan et al. 2018, Sec. 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.lstm = nn.LSTM(12, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, VOCABULARY)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(input_ids))
        return self.head(hidden)


def gpt2(*, vocabulary: int = VOCABULARY, width: int = 16, positions: int = 32) -> nn.Module:
    """GPT-2: tied embeddings, Conv1D layers, position ids of shape (1, T)."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=vocabulary,
            n_positions=positions,
            n_embd=width,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def llama(*, tied: bool) -> nn.Module:
    """Llama with grouped-query attention: four heads share two keys."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            tie_word_embeddings=tied,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )


def _with_lora(model: nn.Module) -> nn.Module:
    adapted = add_lora(model, Lora(rank=3, alpha=6.0))
    # B starts at zero, which would leave the gradient of A at zero: nothing to compare.
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return adapted


def _tied_and_lora() -> nn.Module:
    """Adapters and the tied embedding trained together."""
    model = _with_lora(llama(tied=True))
    embedding = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    embedding.weight.requires_grad_(True)
    return model


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "gpt2 tied": gpt2,
    "llama": lambda: llama(tied=False),
    "llama tied": lambda: llama(tied=True),
    "lstm tied": TiedLSTM,
    "gpt2 + lora": lambda: _with_lora(gpt2()),
    "llama tied + lora": lambda: _with_lora(llama(tied=True)),
    "llama tied and trained + lora": _tied_and_lora,
}


def build(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """A model of the zoo in evaluation mode, the same for the same seed."""
    torch.manual_seed(seed)
    return BUILDERS[name]().to(dtype).eval()


def ragged_batch(lengths: list[int], *, seed: int) -> dict[str, Tensor]:
    """One record a line, padded on the right with token 0 and label -100."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    tokens = torch.randint(1, VOCABULARY, shape, generator=generator)
    outside = torch.arange(shape[1])[None, :] >= torch.tensor(lengths)[:, None]
    return {
        "input_ids": tokens.masked_fill(outside, 0),
        "labels": tokens.masked_fill(outside, -100),
    }


def word_tokenizer(words: tuple[str, ...] = WORDS) -> Any:
    """A tokenizer of whole words; token 0 ends a text, pads it, and stands for unknown words."""
    vocabulary = {word: number for number, word in enumerate(("<end>", *words))}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<end>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<end>", pad_token="<end>", unk_token="<end>"
    )


def save_tiny_base(path: Path, *, seed: int = 0) -> Path:
    """A GPT-2 with a tokenizer of whole words, saved as `transformers` saves it."""
    tokenizer = word_tokenizer()
    torch.manual_seed(seed)
    gpt2(vocabulary=len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
