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

from userdp.losses import RecordLoss, causal_lm_loss, masked_lm_loss
from userdp.models.adapters import Lora, add_lora
from userdp.models.word_lstm import WordLSTM, WordLSTMConfig

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


def gpt2(
    *, vocabulary: int = VOCABULARY, width: int = 16, positions: int = 32, tied: bool = True
) -> nn.Module:
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
            tie_word_embeddings=tied,
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


def _running_mean(x: Tensor) -> Tensor:
    """The mean of each position and those before it: tokens meet without attention."""
    return x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]


class UntiedLSTM(nn.Module):
    """A word-level LSTM with an output layer of its own and, if asked, without biases."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.lstm = nn.LSTM(6, 10, num_layers=2, batch_first=True, bias=bias)
        self.head = nn.Linear(10, VOCABULARY, bias=bias)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(input_ids))
        return self.head(hidden)


class OwnParameter(nn.Module):
    """A block that uses a parameter of its own beside its layers, and returns more than a tensor.

    So do layers with a learned scale on their branch, or attention with learned sinks.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x + self.scale * torch.tanh(self.inner(x)), None


class OwnParameterModel(nn.Module):
    """Blocks that own parameters directly, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList([OwnParameter(8), OwnParameter(8)])
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = _running_mean(self.embedding(input_ids))
        for block in self.blocks:
            x, _ = block(x)
        return self.head(x)


class UsedTwice(nn.Module):
    """One layer applied twice and one weight in two layers: a user's uses add up before its norm.

    The embedding, too, is looked up twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.twice = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.embedding((input_ids * 3) % VOCABULARY)
        x = torch.tanh(self.twice(torch.tanh(self.twice(_running_mean(x)))))
        x = self.norm(self.second(torch.tanh(self.norm(self.first(x)))))
        return self.head(x)


def of_family(family: str, kind: str = "ForCausalLM", **changes: Any) -> nn.Module:
    """A tiny model of any Hugging Face family that has the usual names in its configuration."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
    } | changes
    config = getattr(transformers, f"{family}Config")(**settings)
    return getattr(transformers, family + kind)(config)


def _opt() -> nn.Module:
    """OPT: flattens rows and tokens into one dimension in its blocks, and offsets positions."""
    return of_family("OPT", ffn_dim=24, word_embed_proj_dim=16, dropout=0.0)


def _word_lstm() -> nn.Module:
    """Reads its table twice, brought to length 1, and the weights of its gates by itself."""
    return WordLSTM(WordLSTMConfig(vocab_size=VOCABULARY, embedding_size=6, state_size=10))


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "gpt2 tied": gpt2,
    "llama": lambda: llama(tied=False),
    "llama tied": lambda: llama(tied=True),
    "lstm tied": TiedLSTM,
    "gpt2 + lora": lambda: _with_lora(gpt2()),
    "llama tied + lora": lambda: _with_lora(llama(tied=True)),
    "llama tied and trained + lora": _tied_and_lora,
}

# More kinds of layers and of sharing, for the fast path.
MORE_BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "gpt2 untied": lambda: gpt2(tied=False),
    "qwen2": lambda: of_family("Qwen2", num_key_value_heads=2),
    "qwen3 tied": lambda: of_family(
        "Qwen3", num_key_value_heads=2, head_dim=4, tie_word_embeddings=True
    ),
    "mistral": lambda: of_family("Mistral", num_key_value_heads=2),
    "gemma": lambda: of_family("Gemma", num_key_value_heads=2, head_dim=4),
    "opt": _opt,
    "gpt-neox": lambda: of_family("GPTNeoX"),
    "phi": lambda: of_family("Phi"),
    "bert": lambda: of_family("Bert", "ForMaskedLM"),
    "albert": lambda: of_family("Albert", "ForMaskedLM", embedding_size=8),
    "lstm": UntiedLSTM,
    "lstm without bias": lambda: UntiedLSTM(bias=False),
    "own parameter": OwnParameterModel,
    "used twice": UsedTwice,
    "word lstm": _word_lstm,
}
MASKED = {"bert", "albert"}


def build(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """A model of the zoo in evaluation mode, the same for the same seed."""
    torch.manual_seed(seed)
    return (BUILDERS | MORE_BUILDERS)[name]().to(dtype).eval()


def loss_of(name: str) -> RecordLoss:
    """The loss that a model of the zoo is trained with."""
    return masked_lm_loss if name in MASKED else causal_lm_loss


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
    gpt2(vocabulary=len(tokenizer)).save_pretrained(path)  # pyright: ignore[reportCallIssue]
    tokenizer.save_pretrained(path)
    return path
