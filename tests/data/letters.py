"""A tokenizer of single letters, and a small store for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from importing import KEY

from userdp.data.record import Record
from userdp.data.store import UserStore, write_store


class Letters:
    """A tokenizer of single letters; 0 ends a text."""

    eos_token_id = 0
    chat_template: str | None = None

    def __init__(self, shift: int = 0) -> None:
        self._shift = shift

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(letter) + self._shift for letter in text] for text in texts]}

    def get_vocab(self) -> dict[str, int]:
        return {"a": ord("a") + self._shift}


def store_of(tmp_path: Path, items: list[tuple[str, str]]) -> UserStore:
    write_store([Record(text, (user,), "1") for text, user in items], tmp_path / "s", key=KEY)
    return UserStore.open(tmp_path / "s")


ITEMS = [("abcdefg", "ann"), ("xy", "bob"), ("hijk", "ann"), ("z", "cy")]
