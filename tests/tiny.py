"""A store and a GPT-2 small enough to train in a second."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from store_copies import COPIES
from userdp.data.record import Record
from userdp.data.store import UserStore, write_store

WORDS = tuple("red green blue amber violet grey pink teal black white".split())


def make_store(
    path: Path, records_per_user: Sequence[int], *, seed: int = 0, prefix: str = "u"
) -> UserStore:
    """User i has `records_per_user[i]` records of 3 to 8 words."""

    def write(place: Path) -> None:
        rng = np.random.default_rng(seed)
        records = [
            Record(
                text=" ".join(rng.choice(WORDS, size=rng.integers(3, 9))),
                owners=(f"{prefix}{user}",),
                where=f"record {user}.{number}",
            )
            for user, count in enumerate(records_per_user)
            for number in range(count)
        ]
        write_store(records, place, key=bytes(range(32)))

    COPIES.make(("tiny", tuple(records_per_user), seed, prefix), path, write)
    return UserStore.open(path)


def make_model(path: Path, *, seed: int = 0, width: int = 16) -> tuple[Any, Any]:
    """A one-layer GPT-2 from its configuration, saved with a word tokenizer."""
    import torch
    import transformers

    from userdp.quickstart import word_tokenizer

    tokenizer = word_tokenizer(WORDS)
    torch.manual_seed(seed)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=64,
            n_embd=width,
            n_layer=1,
            n_head=2,
            bos_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    ).eval()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model, tokenizer
