"""Held-out loss, perplexity and next-token accuracy of a causal language model.

The users it is measured on should be others than those trained on: their numbers are not covered by
the guarantee, and the training users' own would leak past it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from userdp.data.tokens import TokenRows
from userdp.errors import InputError
from userdp.updates import IGNORED_LABEL, at_least_float32


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Means over all predicted tokens."""

    loss: float
    accuracy_top1: float
    tokens: int
    users: int

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@torch.no_grad()
def evaluate(
    model: nn.Module, rows: TokenRows, *, pad_token: int, batch_tokens: int = 8192
) -> Evaluation:
    """The model's loss on all rows, in batches of rows of similar length."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total_loss, correct, tokens = 0.0, 0, 0
    for chosen in _batches(rows, batch_tokens):
        input_ids, labels = rows.padded(chosen, pad_token=pad_token)
        ids = torch.from_numpy(input_ids).to(device)
        targets = torch.from_numpy(labels)[:, 1:].to(device)
        output = model(input_ids=ids)
        logits = at_least_float32(output if isinstance(output, torch.Tensor) else output.logits)
        logits = logits[:, :-1]
        losses = F.cross_entropy(
            logits.transpose(1, 2), targets, ignore_index=IGNORED_LABEL, reduction="sum"
        )
        total_loss += float(losses)
        correct += int((logits.argmax(-1) == targets).sum())
        tokens += int((targets != IGNORED_LABEL).sum())
    model.train(was_training)
    if tokens == 0:
        raise InputError("there is no token to predict in the evaluation data.")
    return Evaluation(
        loss=total_loss / tokens,
        accuracy_top1=correct / tokens,
        tokens=tokens,
        users=len(np.unique(rows.owners)),
    )


def _batches(rows: TokenRows, batch_tokens: int) -> list[np.ndarray]:
    lengths = np.diff(rows.indptr)
    order = np.argsort(lengths, kind="stable")
    batches: list[np.ndarray] = []
    start = 0
    while start < len(order):
        stop = start + 1
        while stop < len(order) and lengths[order[stop]] * (stop + 1 - start) <= batch_tokens:
            stop += 1
        batches.append(order[start:stop])
        start = stop
    return batches
