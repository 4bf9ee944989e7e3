"""Chats, where only the assistant's turns are learned, and prompts with their completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from userdp.data.contents import (
    IN_WORDS,
    Messages,
    RefusedChatError,
    TextKind,
    chat_of,
    pair_of,
)
from userdp.data.encoding import EncodedRows, Encoding, RowList
from userdp.errors import InputError
from userdp.tasks.causal import CausalTask
from userdp.tasks.chat_tokens import (
    Tokens,
    chat_pair_tokens,
    chat_tokens,
    check_template,
    has_template,
    pair_tokens,
)


@dataclass(frozen=True, kw_only=True)
class AssistantTurns:
    """The assistant's tokens carry loss; all others are only read.

    A chat that the template refuses has no row. It is never written out in another way.
    """

    name: str = "chat"
    has_labelled: bool = True
    has_classes: bool = False

    def check(self, kind: TextKind, tokenizer: Any, sequence_length: int) -> None:
        """Refuse a store without chats, and a tokenizer that cannot tell whose words are whose."""
        if sequence_length < 2:
            raise InputError(
                f"sequence_length={sequence_length}: predicting takes at least 2 tokens."
            )
        if kind not in ("chat", "pair"):
            raise InputError(
                f"task = 'chat': the store holds {IN_WORDS[kind]}. Import a column of chat "
                "messages, or prompts with --completion; or use another task."
            )
        if kind == "chat" or has_template(tokenizer):
            check_template(tokenizer)
        elif tokenizer.eos_token is None:
            raise InputError("the tokenizer has no end-of-text token (eos_token): set one.")

    def encode(
        self, texts: Sequence[str], kind: TextKind, tokenizer: Any, sequence_length: int
    ) -> EncodedRows:
        """Chats cut into rows, with their labels. A row without a token to predict is left out."""
        rows = RowList()
        for record, stored in enumerate(texts):
            try:
                tokens, labelled = _tokens_of(stored, kind, tokenizer)
            except RefusedChatError:
                continue
            for begin in range(0, len(tokens), sequence_length):
                end = begin + sequence_length
                # The first token of a row is not predicted.
                if any(labelled[begin + 1 : end]):
                    rows.add(record, tokens[begin:end], labelled=labelled[begin:end])
        return rows.encoded()


def _tokens_of(stored: str, kind: TextKind, tokenizer: Any) -> Tokens:
    if kind != "pair":
        return chat_tokens(chat_of(stored), tokenizer)
    prompt, completion = pair_of(stored)
    if not isinstance(prompt, str):
        return chat_pair_tokens(prompt, cast(Messages, completion), tokenizer)
    try:
        return pair_tokens(prompt, cast(str, completion), tokenizer)
    except (RefusedChatError, MemoryError):
        raise
    except Exception as error:
        raise RefusedChatError("the tokenizer fails at it") from error


@dataclass(frozen=True, kw_only=True)
class ChatTask(CausalTask):
    """The next token, in the assistant's turns only."""

    name: str = "chat"

    @property
    def encoding(self) -> Encoding:
        """Chats, cut into rows."""
        return AssistantTurns()
