"""Tokenizers, conversations and stores for the tests of tasks (a helper, not a test)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import transformers

import models_zoo
from shared import SHARED
from stores import KEY
from userdp.data.contents import Messages, TextKind
from userdp.data.identity import Pseudonyms
from userdp.data.record import Record, batches_of
from userdp.data.store import UserStore, write_batches

# ChatML, with and without marks around what the assistant says.
CHATML = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<end>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED_CHATML = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<end>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<end>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_ROLE_TOKENS = ("<|user|>", "<|assistant|>", "<|system|>")


def word_chat_tokenizer(template: str | None) -> Any:
    """Whole words, roles and an end. Word wN is token N + 1; 0 ends a text and a turn."""
    tokenizer = models_zoo.word_tokenizer((*models_zoo.WORDS, *_ROLE_TOKENS))
    tokenizer.add_special_tokens({"additional_special_tokens": list(_ROLE_TOKENS)})
    tokenizer.chat_template = template
    return tokenizer


def byte_tokenizer(special: list[str], texts: list[str]) -> Any:
    """A byte-level BPE like those of GPT-2 and Llama 3, trained on the texts."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<bos>", "<eos>", *special],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>"
    )


def bert_tokenizer() -> Any:
    """Whole words between [CLS] and [SEP]."""
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    vocabulary = {word: number for number, word in enumerate((*special, *models_zoo.WORDS))}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def made_up_chats(count: int, *, seed: int) -> list[Messages]:
    """Chats of one to four rounds: words, numbers, signs, line breaks and other scripts."""
    rng = np.random.default_rng(seed)
    pieces = [
        "blue",
        "sky",
        " 17",
        "\n",
        "\n\n",
        "  two",
        "?",
        "é",
        "日本",
        "🙂",
        "<b>",
        "\ttab",
        ".",
    ]

    def words() -> str:
        return "say" + "".join(rng.choice(pieces, size=int(rng.integers(1, 20))))

    return [
        [
            {"role": role, "content": words()}
            for _ in range(int(rng.integers(1, 5)))
            for role in ("user", "assistant")
        ]
        for _ in range(count)
    ]


def real_chats(count: int) -> list[Messages]:
    """Exchanges of the shared data as chats: their paragraphs in turns."""
    found: list[Messages] = []
    path = SHARED / "data" / "scotus_exchanges_2006_2010.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            parts = [part for part in json.loads(line)["text"].splitlines() if part.strip()]
            even = len(parts[:8]) // 2 * 2
            roles = ("user", "assistant") * (even // 2)
            if even:
                found.append(
                    [
                        {"role": role, "content": part}
                        for role, part in zip(roles, parts[:even], strict=True)
                    ]
                )
            if len(found) == count:
                break
    return found


def store_of(path: Path, texts: list[str], kind: TextKind, *, users: int = 12) -> UserStore:
    """A store of these texts, dealt to the users in turn."""
    records = [
        Record(text, (f"u{number % users}",), f"record {number}")
        for number, text in enumerate(texts)
    ]
    write_batches(batches_of(records, text_kind=kind), path, pseudonyms=Pseudonyms.under(KEY))
    return UserStore.open(path)
