"""Texts with the special tokens that a tokenizer puts around them, such as [CLS] and [SEP]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from userdp.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The special tokens before and behind every text."""

    before: tuple[int, ...]
    behind: tuple[int, ...]

    def room(self, sequence_length: int) -> int:
        """How many tokens of text a row holds."""
        room = sequence_length - len(self.before) - len(self.behind)
        if room < 1:
            raise InputError(
                f"sequence_length={sequence_length} leaves no room for text between the special "
                "tokens of the tokenizer. Set it higher."
            )
        return room

    def around(self, tokens: list[int]) -> list[int]:
        """The tokens in their frame."""
        return [*self.before, *tokens, *self.behind]


def frame_of(tokenizer: Any) -> Frame:
    """The frame that the tokenizer puts around a text, found on a made-up one."""
    text = "a"
    plain: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    framed: list[int] = tokenizer(text)["input_ids"]
    for start in range(len(framed) - len(plain) + 1):
        stop = start + len(plain)
        if plain and framed[start:stop] == plain:
            return Frame(before=tuple(framed[:start]), behind=tuple(framed[stop:]))
    raise InputError(
        "the tokenizer does not keep a text as it is when it adds special tokens to it, so rows "
        "cannot be cut. Use another tokenizer."
    )
