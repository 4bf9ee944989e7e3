"""Classification: each record has one of a few classes, whose names are public."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from userdp.data.contents import IN_WORDS, TextKind, label_of
from userdp.data.encoding import EncodedRows, Encoding, RowList, ids_of
from userdp.data.tokens import TokenRows
from userdp.errors import InputError
from userdp.index import IGNORED_LABEL, Rows
from userdp.losses import Batch, RecordLoss, at_least_float32, class_logits, classification_loss
from userdp.tasks.framed import frame_of


@dataclass(frozen=True, kw_only=True)
class LabelledText:
    """One row per record: the beginning of its text, and the number of its class.

    A record whose label is not one of the class names has no row, so it contributes nothing. The
    names are public and never collected from the records.
    """

    classes: tuple[str, ...]
    has_labelled: bool = False
    has_classes: bool = True

    @property
    def name(self) -> str:
        """The names of the classes, in order: they number the classes."""
        return f"classification {list(self.classes)}"

    def check(self, kind: TextKind, tokenizer: Any, sequence_length: int) -> None:
        """Refuse a store without labels, and rows without room for text."""
        if kind != "labelled":
            raise InputError(
                f"task = 'classification': the store holds {IN_WORDS[kind]}, without labels. "
                "Import it with --label COLUMN (Python: label=)."
            )
        frame_of(tokenizer).room(sequence_length)

    def encode(
        self, texts: Sequence[str], kind: TextKind, tokenizer: Any, sequence_length: int
    ) -> EncodedRows:
        """The rows of the records whose class is known."""
        rows, frame = RowList(), frame_of(tokenizer)
        room = frame.room(sequence_length)
        numbers = {name: number for number, name in enumerate(self.classes)}
        for record, ids in enumerate(ids_of(texts, kind, tokenizer)):
            of_class = numbers.get(label_of(texts[record]))
            if of_class is not None and ids:
                rows.add(record, frame.around(ids[:room]), of_class=of_class)
        return rows.encoded()


@dataclass(frozen=True, kw_only=True)
class ClassificationTask:
    """The class of a record, from the beginning of its text."""

    pad_token: int
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(set(self.classes)) < max(2, len(self.classes)):
            raise InputError(
                f"classes={list(self.classes)}: give the names of two classes or more, each once."
            )

    @property
    def name(self) -> str:
        """The names of the classes are part of it."""
        return self.encoding.name

    @property
    def encoding(self) -> Encoding:
        """The beginning of each text, with its class."""
        return LabelledText(classes=self.classes)

    @property
    def record_loss(self) -> RecordLoss:
        """Minus the log-likelihood of a record's class."""
        return classification_loss

    def batch(self, rows: TokenRows, group: Rows, rng: np.random.Generator) -> Batch:
        """Input ids, the class of each, and where the record is. Nothing here is random."""
        assert rows.classes is not None
        tokens, inside = rows.padded(group, pad_token=self.pad_token)
        classes = rows.classes[np.asarray(group, dtype=np.int64)]
        return {
            "input_ids": torch.from_numpy(tokens),
            "labels": torch.from_numpy(np.array(classes, dtype=np.int64)),
            "attention_mask": torch.from_numpy((inside != IGNORED_LABEL).astype(np.int64)),
        }

    def example(self, tokenizer: Any) -> Batch:
        """One row per class, which together hold the whole vocabulary."""
        count = len(self.classes)
        length = -(-len(tokenizer) // count)
        tokens = (torch.arange(count * length) % len(tokenizer)).view(count, length)
        return {
            "input_ids": tokens,
            "labels": torch.arange(count),
            "attention_mask": torch.ones_like(tokens),
        }

    def predictions(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """One place per record: its class."""
        logits = at_least_float32(class_logits(model, batch))
        return logits[:, None], batch["labels"][:, None]
