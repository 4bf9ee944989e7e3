"""Held-out loss, perplexity and next-token accuracy of a causal language model, also by user.

Measure on users who were not trained on. No guarantee covers these numbers: measured on training
users, they would reveal more than the run's guarantee allows.
"""

from __future__ import annotations

import logging
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from userdp.data.tokens import TokenRows, tokenise, tokenise_by_record
from userdp.errors import InputError, MixedExamplesError
from userdp.history import history_of
from userdp.index import IGNORED_LABEL, ranges
from userdp.losses import sent
from userdp.measuring import measuring, on_gpu, usual_tokens
from userdp.module_state import ModuleState
from userdp.tasks import CausalTask, Task, task_named, usual_task

if TYPE_CHECKING:
    from userdp.data.store import UserStore

_LOG = logging.getLogger(__name__)
# Tokens in a row when records are scored, as `train` and `evaluate` cut them by default.
ROW_TOKENS = 128
# The seed of what a task draws in an evaluation. It is public: nothing here is private.
_SEED = 0


# The levels at which the distribution of users' losses is told.
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Means over all predicted tokens, and the mean loss of each user.

    A token counts once in `loss`, `accuracy_top1` and `tokens`. A record of several owners counts
    for each of them in `user_losses`.
    """

    loss: float
    accuracy_top1: float
    tokens: int
    user_losses: NDArray[np.float64] = field(repr=False)

    @property
    def users(self) -> int:
        """How many users have a token to predict."""
        return len(self.user_losses)

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def mean_user_loss(self) -> float:
        """The mean over users of their mean loss: everybody counts the same."""
        return float(self.user_losses.mean())

    @property
    def worst_decile_loss(self) -> float:
        """The mean loss of the tenth of users with the highest loss."""
        highest = -(-self.users // 10)
        return float(np.sort(self.user_losses)[-highest:].mean())

    @property
    def user_loss_quantiles(self) -> dict[str, float]:
        """Quantiles of the users' mean losses, by their level."""
        found = np.quantile(self.user_losses, QUANTILES)
        return {f"{level:g}": float(value) for level, value in zip(QUANTILES, found, strict=True)}

    def to_json(self) -> dict[str, Any]:
        """All numbers; one that is not finite is null."""
        return {
            "loss": finite(self.loss),
            "perplexity": finite(self.perplexity),
            "accuracy_top1": self.accuracy_top1,
            "tokens": self.tokens,
            "users": self.users,
            "mean_user_loss": finite(self.mean_user_loss),
            "worst_decile_loss": finite(self.worst_decile_loss),
            "user_loss_quantiles": {
                level: finite(value) for level, value in self.user_loss_quantiles.items()
            },
        }


def finite(value: float) -> float | None:
    """The number, or None if it is not finite: JSON has no other."""
    return value if math.isfinite(value) else None


def evaluate(
    model: nn.Module,
    rows: TokenRows,
    *,
    pad_token: int,
    task: Task | None = None,
    batch_tokens: int | None = None,
    compute_dtype: torch.dtype | None = None,
    unknown: int | None = None,
) -> Evaluation:
    """Measure the model on all rows, in batches of rows of similar length.

    `task` says what is predicted: by default the next token, where it carries loss.
    `batch_tokens` are a batch's, by default as many as suit the device.
    `compute_dtype` is the dtype of products, by autocast; None leaves that of the weights.
    `unknown` is the token of words outside a dictionary: where it is the next one, no prediction
    is right, so that dictionaries can be compared (McMahan et al. 2018, App. B).
    """
    task = task or CausalTask(pad_token=pad_token)
    sums = _row_sums(model, rows, task, batch_tokens, compute_dtype, unknown)
    return _summary(sums, np.arange(len(rows)), np.asarray(rows.owners))


def evaluate_store(
    model: nn.Module,
    tokenizer: Any,
    store: UserStore,
    *,
    sequence_length: int = ROW_TOKENS,
    task: Task | None = None,
    batch_tokens: int | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Evaluation:
    """Measure the model on all records of a store, also where records have several owners."""
    task = task or CausalTask(pad_token=tokenizer.pad_token_id)
    rows = tokenise_by_record(
        store, tokenizer, sequence_length=sequence_length, encoding=task.encoding
    )
    unknown = unknown_word(tokenizer)
    sums = _row_sums(model, rows, task, batch_tokens, compute_dtype, unknown)
    records = np.asarray(rows.owners)
    owners = store.users_per_record()[records]
    row = np.repeat(np.arange(len(rows)), owners)
    user = np.asarray(store.record_users)[ranges(store.record_users_indptr[records], owners)]
    return _summary(sums, row, user)


@dataclass(frozen=True, kw_only=True)
class _RowSums:
    """What was found in each row: sum of losses, right predictions, predicted tokens."""

    loss: NDArray[np.float64]
    correct: NDArray[np.int64]
    tokens: NDArray[np.int64]


def _row_sums(
    model: nn.Module,
    rows: TokenRows,
    task: Task,
    batch_tokens: int | None,
    compute_dtype: torch.dtype | None,
    unknown: int | None,
) -> _RowSums:
    device = next(model.parameters()).device
    most = usual_tokens(model, device) if batch_tokens is None else batch_tokens
    waiting = _batches(np.diff(rows.indptr), most)[::-1]
    order: list[np.ndarray] = []
    found: list[torch.Tensor] = []
    kernels = on_gpu(model) if device.type == "cuda" else nullcontext()
    with measuring(model), _products_in(compute_dtype, device), kernels:
        while waiting:
            chosen = waiting.pop()
            try:
                found.append(_batch_sums(*_predict(model, rows, chosen, device, task), unknown))
            except torch.OutOfMemoryError:
                # Training may have left little memory. A charged run must not end for that.
                if len(chosen) == 1:
                    raise
                torch.cuda.empty_cache()
                waiting += np.array_split(chosen, 2)[::-1]
            else:
                order.append(chosen)
    sums = np.zeros((3, len(rows)))
    if found:
        sums[:, np.concatenate(order)] = torch.cat(found, dim=1).cpu().numpy()
    return _RowSums(loss=sums[0], correct=sums[1].astype(np.int64), tokens=sums[2].astype(np.int64))


def _batch_sums(logits: torch.Tensor, targets: torch.Tensor, unknown: int | None) -> torch.Tensor:
    """Losses, right predictions and predicted tokens, summed over each row.

    They stay on the device until the end, so that no batch waits for another.
    """
    # Flat, as the logits lie in memory: several times faster than with positions behind the words.
    losses = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
    ).view(targets.shape)
    right = logits.argmax(-1) == targets
    if unknown is not None:
        right &= targets != unknown
    told = (losses, right, targets != IGNORED_LABEL)
    return torch.stack([one.double().sum(1) for one in told])


def unknown_word(tokenizer: Any) -> int | None:
    """The token of words outside the dictionary; None if the tokenizer can spell every text.

    Tokenizers of pieces of words name some other token as the unknown one, which stands for
    something else.
    """
    others = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    unknown = getattr(tokenizer, "unk_token_id", None)
    return None if unknown in others else unknown


def _products_in(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def _summary(sums: _RowSums, row: NDArray[np.int64], user: NDArray[np.int64]) -> Evaluation:
    """The numbers of all rows; `row[i]` belongs to `user[i]`, and perhaps to others, too."""
    tokens = int(sums.tokens.sum())
    if tokens == 0:
        raise InputError("there is no token to predict in the evaluation data.")
    by_user = np.bincount(user, weights=sums.loss[row])
    tokens_of_user = np.bincount(user, weights=sums.tokens[row])
    present = tokens_of_user > 0
    return Evaluation(
        loss=float(sums.loss.sum()) / tokens,
        accuracy_top1=int(sums.correct.sum()) / tokens,
        tokens=tokens,
        user_losses=by_user[present] / tokens_of_user[present],
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
    # In chats only what the assistant says is learned, so only that is scored.
    task = task_named(usual_task(store.text_kind), tokenizer)
    rows = tokenise(store, tokenizer, sequence_length=length, encoding=task.encoding)
    assert rows.records is not None
    return mean_losses(
        model,
        rows,
        np.asarray(rows.records),
        num_records=store.num_records,
        pad_token=tokenizer.pad_token_id,
    )


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
    are chosen, they must not depend on other users, not even in the last bit. So what the model
    keeps of a user is put back before the next one, and a user whom it cannot read has no losses.
    """
    device = next(model.parameters()).device
    task = CausalTask(pad_token=pad_token)
    loss = np.zeros(num_records)
    tokens = np.zeros(num_records, dtype=np.int64)
    lengths = np.diff(rows.indptr)
    index = rows.index()
    state = ModuleState(model)
    as_it_was = _version(model)
    failures = 0
    for user in range(index.num_users):
        own = index.rows_of(user)
        try:
            with measuring(model):
                for batch in _batches(lengths[own], batch_tokens):
                    chosen = own[batch]
                    logits, targets = _predict(model, rows, chosen, device, task)
                    losses = F.cross_entropy(
                        logits.transpose(1, 2),
                        targets,
                        ignore_index=IGNORED_LABEL,
                        reduction="none",
                    )
                    records = record_of_row[chosen]
                    np.add.at(loss, records, losses.double().sum(1).cpu().numpy())
                    np.add.at(tokens, records, (targets != IGNORED_LABEL).sum(1).cpu().numpy())
        except Exception as error:
            # Running out of memory is a matter of the machine, not of the data. On a CPU torch
            # raises a usual error for it.
            is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
            if is_memory or "DefaultCPUAllocator" in str(error):
                raise
            failures += 1
            tokens[record_of_row[own]] = 0
        finally:
            state.restore()
    if _version(model) != as_it_was:
        raise MixedExamplesError(
            "the model changes its weights or its modules as it reads, so that one user's records "
            "change the scores of others. Choose records by another criterion."
        )
    if failures and failures == index.num_users:
        _LOG.warning("the model could read the records of no user: none has a score.")
    return np.divide(loss, tokens, out=np.full(num_records, np.nan), where=tokens > 0)


def _version(model: nn.Module) -> list[tuple[int, float]]:
    """What differs once a weight was written to, or a module came or went."""
    found = [(id(module), 0.0) for module in model.modules()]
    # Versions do not count what is written through `.data`.
    return found + [(id(p), float(p.detach().double().sum())) for p in model.parameters()]


def _predict(
    model: nn.Module,
    rows: TokenRows,
    chosen: np.ndarray,
    device: torch.device,
    task: Task,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits and what they should predict, one line for each row."""
    # What is hidden in a row is the same in every evaluation, so that numbers can be compared.
    rng = np.random.default_rng([_SEED, int(chosen[0])])
    batch = {name: sent(tensor, device) for name, tensor in task.batch(rows, chosen, rng).items()}
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
