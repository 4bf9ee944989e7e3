"""A tiny Llama with a tokenizer and a chat template, and chats and texts of made-up users."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tiny import WORDS
from userdp.quickstart import word_tokenizer

USERS = 24
PRIVACY: dict[str, Any] = {"epsilon": 8.0, "num_users": USERS}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"
)


def make_llama(path: Path) -> Path:
    """A random two-layer Llama, saved with a word tokenizer."""
    tokenizer = word_tokenizer((*WORDS, "user", "assistant"))
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def texts(users: int, *, prefix: str = "u", each: int = 2, seed: int = 0) -> list[dict[str, Any]]:
    """`each` texts of every user."""
    rng = np.random.default_rng(seed)
    return [
        {"user_id": f"{prefix}{user}", "text": " ".join(rng.choice(WORDS, size=6))}
        for user in range(users)
        for _ in range(each)
    ]


def chats(users: int) -> list[dict[str, Any]]:
    """The same texts as chats."""
    return [
        {
            "user_id": row["user_id"],
            "messages": [
                {"role": "user", "content": row["text"]},
                {"role": "assistant", "content": "red green"},
            ],
        }
        for row in texts(users)
    ]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
