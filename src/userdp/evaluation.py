"""Held-out loss, perplexity and next-token accuracy of a causal language model.

Measure on users who were not trained on. No guarantee covers these numbers: measured on training
users, they would reveal more than the run's guarantee allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from userdp.data.tokens import TokenRows, tokenise_with_records
from userdp.errors import InputError
from userdp.history import history_of
from userdp.index import IGNORED_LABEL
from userdp.tasks import CausalTask, Task

if TYPE_CHECKING:
    from userdp.data.store import UserStore

# Tokens in a row when records are scored, as `train` and `evaluate` cut them by default.
ROW_TOKENS = 128
# The seed of what a task draws in an evaluation. It is public: nothing here is private.
_SEED = 0


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
    model: nn.Module,
    rows: TokenRows,
    *,
    pad_token: int,
    task: Task | None = None,
    batch_tokens: int = 8192,
) -> Evaluation:
    """Measure the model on all rows, in batches of rows of similar length.

    `task` says what is predicted: by default the next token, where it carries loss.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total_loss, correct, tokens = 0.0, 0, 0
    for chosen in _batches(np.diff(rows.indptr), batch_tokens):
        logits, targets = _predict(model, rows, chosen, pad_token, device, task)
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


def check_public(model: nn.Module) -> None:
    """Refuse to score records by a model that carries a private run, as far as it says so."""
    if history_of(model).all_entries():
        raise InputError(
            "records are to be scored by a model that was trained on private data: its scores are "
            "not public, and what a user keeps would depend on other users. Score by a public "
            "model, or choose records by length or at random."
        )


def record_losses(
    model: nn.Module, tokenizer: Any, store: UserStore, *, sequence_length: int | None = None
) -> np.ndarray:
    """Return the mean loss of each record of a store: the logarithm of its perplexity.

    `sequence_length` is that of the training that the scores are for: longer records are cut into
    rows, as they are there. By default it is 128, or the model's positions if they are fewer.

    The model must be public. One that was trained on these users carries their records into the
    scores of others.
    """
    check_public(model)
    positions = getattr(model.config, "max_position_embeddings", None)
    length = sequence_length or min(ROW_TOKENS, positions or ROW_TOKENS)
    if positions is not None and length > positions:
        raise InputError(
            f"--sequence-length {length} is above the {positions} positions of the model: give "
            f"{positions} or less."
        )
    rows, record_of_row = tokenise_with_records(store, tokenizer, sequence_length=length)
    return mean_losses(
        model,
        rows,
        record_of_row,
        num_records=store.num_records,
        pad_token=tokenizer.pad_token_id,
    )


@torch.no_grad()
def mean_losses(
    model: nn.Module,
    rows: TokenRows,
    record_of_row: np.ndarray,
    *,
    num_records: int,
    pad_token: int,
    batch_tokens: int = 8192,
) -> np.ndarray:
    """Return each record's mean loss over all its predicted tokens; NaN if it has none.

    The exponential of the loss is the record's perplexity. Each batch holds the rows of one user
    only. How a product rounds may depend on the batch's shape. Where losses decide which records
    are chosen, they must not depend on other users, not even in the last bit.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    loss = np.zeros(num_records)
    tokens = np.zeros(num_records, dtype=np.int64)
    lengths = np.diff(rows.indptr)
    index = rows.index()
    for user in range(index.num_users):
        own = index.rows_of(user)
        for batch in _batches(lengths[own], batch_tokens):
            chosen = own[batch]
            logits, targets = _predict(model, rows, chosen, pad_token, device)
            losses = F.cross_entropy(
                logits.transpose(1, 2), targets, ignore_index=IGNORED_LABEL, reduction="none"
            )
            records = record_of_row[chosen]
            np.add.at(loss, records, losses.double().sum(1).cpu().numpy())
            np.add.at(tokens, records, (targets != IGNORED_LABEL).sum(1).cpu().numpy())
    model.train(was_training)
    return np.divide(loss, tokens, out=np.full(num_records, np.nan), where=tokens > 0)


def _predict(
    model: nn.Module,
    rows: TokenRows,
    chosen: np.ndarray,
    pad_token: int,
    device: torch.device,
    task: Task | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits and what they should predict, one line for each row."""
    task = task or CausalTask(pad_token=pad_token)
    # What is hidden in a row is the same in every evaluation, so that numbers can be compared.
    rng = np.random.default_rng([_SEED, int(chosen[0])])
    batch = {name: tensor.to(device) for name, tensor in task.batch(rows, chosen, rng).items()}
    return task.predictions(model, batch)


def _batches(lengths: np.ndarray, batch_tokens: int) -> list[np.ndarray]:
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
