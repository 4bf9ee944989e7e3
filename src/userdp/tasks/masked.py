"""Masked language modelling: some tokens of a record are hidden, and predicted from the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from userdp.data.contents import TextKind, refuse_unwritten
from userdp.data.encoding import EncodedRows, Encoding, RowList, ids_of
from userdp.data.tokens import TokenRows
from userdp.errors import InputError
from userdp.index import IGNORED_LABEL, Rows
from userdp.losses import Batch, RecordLoss, at_least_float32, logits_of, masked_lm_loss
from userdp.tasks.framed import frame_of

# What becomes of the tokens that are predicted: these shares are hidden behind the mask token and
# replaced by a random token. The rest stays, so that the model cannot trust what it sees.
_HIDDEN = 0.8
_RANDOM = 0.1


@dataclass(frozen=True, kw_only=True)
class FramedText:
    """The text cut into rows, each between the tokenizer's special tokens."""

    name: str = "framed"
    has_labelled: bool = False
    has_classes: bool = False

    def check(self, kind: TextKind, tokenizer: Any, sequence_length: int) -> None:
        """Refuse a tokenizer without a mask token, or template for chats, and rows without room."""
        refuse_unwritten(kind, tokenizer)
        if tokenizer.mask_token_id is None:
            raise InputError(
                "task = 'masked': the tokenizer has no mask token. Use a model that was made for "
                "masked language modelling, such as BERT."
            )
        frame_of(tokenizer).room(sequence_length)

    def encode(
        self, texts: Sequence[str], kind: TextKind, tokenizer: Any, sequence_length: int
    ) -> EncodedRows:
        """Rows of the texts. A text without a token has none."""
        rows, frame = RowList(), frame_of(tokenizer)
        room = frame.room(sequence_length)
        for record, ids in enumerate(ids_of(texts, kind, tokenizer)):
            for begin in range(0, len(ids), room):
                rows.add(record, frame.around(ids[begin : begin + room]))
        return rows.encoded()


@dataclass(frozen=True, kw_only=True)
class MaskedTask:
    """A random share of each record's tokens is predicted; new ones are drawn for every step.

    A chosen token is hidden with probability 0.8, replaced by a random token with probability 0.1,
    and left as it is otherwise. Special tokens are never chosen.
    Reference: Devlin et al. 2019, Sec. 3.1; with user-level privacy, Ganesh et al. 2025, Sec. 5.1.
    """

    pad_token: int
    mask_token: int
    vocabulary: int
    special_tokens: tuple[int, ...]
    share: float = 0.15

    @staticmethod
    def of(tokenizer: Any) -> MaskedTask:
        """The task with the tokenizer's own tokens."""
        return MaskedTask(
            pad_token=tokenizer.pad_token_id or 0,
            mask_token=-1 if tokenizer.mask_token_id is None else tokenizer.mask_token_id,
            vocabulary=len(tokenizer),
            special_tokens=tuple(sorted(tokenizer.all_special_ids)),
        )

    @property
    def name(self) -> str:
        """The share, the mask and the tokens that are never hidden are part of the name."""
        return f"masked {self.share!r} {self.mask_token} {list(self.special_tokens)}"

    @property
    def encoding(self) -> Encoding:
        """The text between special tokens."""
        return FramedText()

    @property
    def record_loss(self) -> RecordLoss:
        """The mean over a record's chosen tokens."""
        return masked_lm_loss

    def batch(self, rows: TokenRows, group: Rows, rng: np.random.Generator) -> Batch:
        """Input ids with hidden tokens, what they were, and where the record is."""
        tokens, inside = rows.padded(group, pad_token=self.pad_token)
        is_text = inside != IGNORED_LABEL
        chosen = is_text & ~np.isin(tokens, self.special_tokens)
        chosen &= rng.random(tokens.shape) < self.share
        what = rng.random(tokens.shape)
        others = rng.integers(self.vocabulary, size=tokens.shape)
        shown = np.where(chosen & (what < _HIDDEN), self.mask_token, tokens)
        at_random = chosen & (what >= _HIDDEN) & (what < _HIDDEN + _RANDOM)
        shown = np.where(at_random, others, shown)
        return {
            "input_ids": torch.from_numpy(shown),
            "labels": torch.from_numpy(np.where(chosen, tokens, IGNORED_LABEL)),
            "attention_mask": torch.from_numpy(is_text.astype(np.int64)),
        }

    def example(self, tokenizer: Any) -> Batch:
        """One row with the whole vocabulary, all of it predicted."""
        tokens = torch.arange(len(tokenizer))[None]
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}

    def predictions(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Each place predicts its own token."""
        output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        return at_least_float32(logits_of(output)), batch["labels"]
