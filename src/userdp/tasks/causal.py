"""Causal language modelling: every token of a record is predicted from those before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from userdp.data.encoding import WHOLE_TEXT, Encoding
from userdp.data.tokens import TokenRows
from userdp.index import IGNORED_LABEL, Rows
from userdp.losses import Batch, RecordLoss, at_least_float32, causal_lm_loss, logits_of


@dataclass(frozen=True, kw_only=True)
class CausalTask:
    """The next token, everywhere in the record.

    Rows are padded on the right. A causal model never looks there, so no mask is needed.
    """

    pad_token: int
    name: str = "causal"

    @property
    def encoding(self) -> Encoding:
        """The whole text, cut into rows."""
        return WHOLE_TEXT

    @property
    def record_loss(self) -> RecordLoss:
        """The mean over a record's labelled tokens."""
        return causal_lm_loss

    def batch(self, rows: TokenRows, group: Rows, rng: np.random.Generator) -> Batch:
        """Input ids and labels. Nothing here is random."""
        input_ids, labels = rows.padded(group, pad_token=self.pad_token)
        return {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}

    def example(self, tokenizer: Any) -> Batch:
        """One row with the whole vocabulary: a model may not tell how large it is."""
        tokens = torch.arange(len(tokenizer))[None]
        return {"input_ids": tokens, "labels": tokens}

    def predictions(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Each token predicts the next one. The last one has none to predict."""
        # A Hugging Face model would otherwise build a key-value cache that nobody reads.
        options = {"use_cache": False} if hasattr(model, "generation_config") else {}
        logits = at_least_float32(logits_of(model(input_ids=batch["input_ids"], **options)))
        return logits, F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)
