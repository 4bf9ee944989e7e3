"""How records become rows of tokens, and which tokens of a row carry loss.

Each task has an encoding. Rows of a record depend on that record alone. A record that an encoding
cannot read has no row, so it contributes nothing: one user's record must not end the run of all.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from userdp.data.contents import RefusedChatError, TextKind, refuse_unwritten, text_of
from userdp.errors import InputError


@dataclass(frozen=True, kw_only=True)
class EncodedRows:
    """Rows of a batch of records, one after the other.

    `records` says which record of the batch each row is from. `labelled` says of every token
    whether it carries loss, and `classes` gives the class of each row. Either is empty if the
    encoding has no such thing.
    """

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int64]
    records: NDArray[np.int64]
    labelled: NDArray[np.bool_]
    classes: NDArray[np.int64]

    def __repr__(self) -> str:
        return "EncodedRows(<secret>)"


class Encoding(Protocol):
    """Turns the texts of a store into rows."""

    @property
    def name(self) -> str:
        """What changes with anything that changes the rows, beside texts, tokenizer and length."""
        ...

    @property
    def has_labelled(self) -> bool:
        """Whether some tokens carry loss and others do not."""
        ...

    @property
    def has_classes(self) -> bool:
        """Whether every row has a class."""
        ...

    def check(self, kind: TextKind, tokenizer: Any, sequence_length: int) -> None:
        """Raise `InputError` if no record of this kind can be encoded. No record is looked at."""
        ...

    def encode(
        self, texts: Sequence[str], kind: TextKind, tokenizer: Any, sequence_length: int
    ) -> EncodedRows:
        """The rows of the records, each of at most `sequence_length` tokens."""
        ...


@dataclass(frozen=True, kw_only=True)
class WholeText:
    """Every token of the text carries loss, and the end-of-text token after it.

    Before it stands the tokenizer's begin-of-text token, if the tokenizer says so (`begins_texts`).
    """

    name: str = ""
    has_labelled: bool = False
    has_classes: bool = False

    def check(self, kind: TextKind, tokenizer: Any, sequence_length: int) -> None:
        """Refuse a tokenizer that cannot end a text, or cannot write out the store's chats."""
        refuse_unwritten(kind, tokenizer)
        if sequence_length < 2:
            raise InputError(
                f"sequence_length={sequence_length}: predicting takes at least 2 tokens."
            )
        if tokenizer.eos_token_id is None:
            raise InputError("the tokenizer has no end-of-text token (eos_token): set one.")
        if begins_texts(tokenizer) and tokenizer.bos_token_id is None:
            raise InputError(
                f"the tokenizer says {BEGINS_TEXTS} and has no begin-of-text token (bos_token): "
                f"set one, or take {BEGINS_TEXTS} out of its tokenizer_config.json."
            )

    def encode(
        self, texts: Sequence[str], kind: TextKind, tokenizer: Any, sequence_length: int
    ) -> EncodedRows:
        """Begin, text and end, cut into rows. A row of one token predicts nothing: it is left out.

        So is a text without a token.
        """
        rows = RowList()
        end: int = tokenizer.eos_token_id
        begin: list[int] = [tokenizer.bos_token_id] if begins_texts(tokenizer) else []
        for record, ids in enumerate(ids_of(texts, kind, tokenizer)):
            closed = [*begin, *ids, end] if ids else []
            for first in range(0, len(closed), sequence_length):
                row = closed[first : first + sequence_length]
                if len(row) > 1:
                    rows.add(record, row)
        return rows.encoded()


WHOLE_TEXT = WholeText()

# The name in a tokenizer's tokenizer_config.json. Models that were trained without a begin-of-text
# token before every text must not get one, so nothing else is taken for it.
BEGINS_TEXTS = "begins_texts"


def begins_texts(tokenizer: Any) -> bool:
    """Whether every text begins with the tokenizer's begin-of-text token (M18 App. B)."""
    return getattr(tokenizer, "init_kwargs", {}).get(BEGINS_TEXTS) is True


# No tokenizer was made with these words in mind, and the two texts have no word in common.
_MADE_UP = "q\u00fcxz \u0e5b\u0f00 \u2f00\U0001f9ff zzyzx"
_OTHERS = "jw\u00f8k \u0e4f\u0f01 \u2f01\U0001f9fe vvuvv"
LEARNS = (
    "the tokenizer learns words as it reads, so that one user's words decide how those of others "
    "are read. Use one that stays as it is."
)


def refuse_unknown_words(tokenizer: Any) -> None:
    """Refuse a tokenizer without a token for what it does not know: it fails at somebody's word."""
    try:
        _read([_MADE_UP], tokenizer)
    except Exception as error:
        raise InputError(
            "the tokenizer cannot read every text: it failed at made-up words "
            f"({type(error).__name__}). Give it a token for what it does not know (unk_token)."
        ) from None


NOTHING = (
    "no record has a token to predict: texts are empty, or nothing in them carries loss (no "
    "assistant's turn, known label, or chat that the template takes). The task is {}."
)


def copied(tokenizer: Any) -> Any:
    """A copy of the tokenizer as it is now; None of one that cannot be copied."""
    try:
        return copy.deepcopy(tokenizer)
    except Exception:
        return None


def learns(tokenizer: Any, before: Any) -> bool:
    """Whether reading has changed the tokenizer; `before` is a copy that has read nothing since.

    A tokenizer that learns words as it reads shows by its numbers who came first. Made-up words
    that are new to it then have other numbers than in the copy. One that reads at random differs
    from its copy, too.
    """
    copies = copied(before), copied(before), copied(tokenizer)
    if any(one is None for one in copies):
        return False
    first, second, now = (_read([_OTHERS], one) for one in copies)
    return first == second != now


def ids_of(texts: Sequence[str], kind: TextKind, tokenizer: Any) -> list[list[int]]:
    """The tokens of each record's words, without special tokens.

    A chat that is refused has none, and neither has a text that the tokenizer fails at.
    """
    words = list(texts) if kind == "plain" else [_words(text, kind, tokenizer) for text in texts]
    try:
        found = _read([word or "" for word in words], tokenizer)
    except MemoryError:
        raise
    except Exception:
        found = [_read_alone(word or "", tokenizer) for word in words]
    # A tokenizer may make something of an empty text.
    return [[] if word is None else ids for word, ids in zip(words, found, strict=True)]


def _read(texts: list[str], tokenizer: Any) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)[
        "input_ids"
    ]


def _read_alone(text: str, tokenizer: Any) -> list[int]:
    try:
        return _read([text], tokenizer)[0]
    except MemoryError:
        raise
    except Exception:
        return []


def _words(text: str, kind: TextKind, tokenizer: Any) -> str | None:
    """The words of a record; None for a chat that the template refuses."""
    try:
        return text_of(text, kind, tokenizer)
    except RefusedChatError:
        return None


class RowList:
    """Collects rows."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._lengths: list[int] = []
        self._records: list[int] = []
        self._labelled: list[bool] = []
        self._classes: list[int] = []

    def add(
        self,
        record: int,
        tokens: Sequence[int],
        *,
        labelled: Sequence[bool] = (),
        of_class: int | None = None,
    ) -> None:
        """Add one row of a record."""
        self._tokens += tokens
        self._lengths.append(len(tokens))
        self._records.append(record)
        self._labelled += labelled
        if of_class is not None:
            self._classes.append(of_class)

    def encoded(self) -> EncodedRows:
        """All rows."""
        return EncodedRows(
            tokens=np.asarray(self._tokens, np.int32),
            lengths=np.asarray(self._lengths, np.int64),
            records=np.asarray(self._records, np.int64),
            labelled=np.asarray(self._labelled, np.bool_),
            classes=np.asarray(self._classes, np.int64),
        )
