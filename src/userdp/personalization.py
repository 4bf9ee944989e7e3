"""How much a model gains when it is tuned further for one person (Charles et al. 2024, App. G.2).

Each test user's records are halved. A copy of the model takes four epochs of SGD on the first half.
The loss on the second half is measured before and after. No guarantee covers these people: the
tuned copies are thrown away, and the numbers are theirs.

Where only LoRA adapters are trained, many users are tuned at once (`stacked_lora`). Other models
are tuned for one user after the other. Both give the same numbers, up to rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from userdp.data.store import UserStore
from userdp.data.tokens import TokenRows, tokenise_by_record
from userdp.errors import InputError
from userdp.evaluation import QUANTILES, finite, measuring
from userdp.index import IGNORED_LABEL
from userdp.losses import Batch, on_device
from userdp.models.checks import trainable_parameters
from userdp.stacked_lora import UnstackableError, adapter_layers, stacked
from userdp.tasks import CausalTask, ChatTask, Task, TaskName
from userdp.training.configured import named_task

# With four epochs of SGD (App. G.2). The paper tunes the rate and does not state it.
EPOCHS = 4
LEARNING_RATE = 0.1
# The seed of what a task draws here. It is public: nothing here is private.
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Personalization:
    """The mean loss of each user on the second half of their records, before and after tuning.

    `left_out` users have no two records with something to predict, or nothing to predict in the
    second half. `how` says what was tuned.
    """

    before: NDArray[np.float64] = field(repr=False)
    after: NDArray[np.float64] = field(repr=False)
    left_out: int
    how: str

    @property
    def loss_before(self) -> float:
        """The mean over users without tuning."""
        return float(self.before.mean())

    @property
    def loss_after(self) -> float:
        """The mean over users, each with a model of their own."""
        return float(self.after.mean())

    def __repr__(self) -> str:
        return (
            f"Personalization(loss_before={self.loss_before:.4f}, "
            f"loss_after={self.loss_after:.4f}, users={len(self.before):,}, tuned={self.how!r})"
        )

    def to_json(self) -> dict[str, Any]:
        """All numbers."""
        gained = self.before - self.after
        return {
            "loss_before": finite(self.loss_before),
            "loss_after": finite(self.loss_after),
            "users": len(self.before),
            "users_left_out": self.left_out,
            "share_improved": float((gained > 0).mean()),
            "gain_quantiles": {
                f"{level:g}": finite(float(value))
                for level, value in zip(QUANTILES, np.quantile(gained, QUANTILES), strict=True)
            },
            "tuned": self.how,
        }


def personalize(
    model: nn.Module,
    tokenizer: Any,
    store: UserStore,
    *,
    task: Task | TaskName | None = None,
    sequence_length: int = 128,
    epochs: int = EPOCHS,
    learning_rate: float = LEARNING_RATE,
    batch_rows: int = 8,
    users_at_once: int = 32,
    one_by_one: bool = False,
) -> Personalization:
    """Tune a copy of the model for each user of the store, and measure what that user gains.

    `task` says what is learned and predicted, as in `train`: by default the next token, of chats in
    the assistant's turns only. The loss on the second half is computed as `evaluate_store` does;
    what a task draws, such as the tokens that are hidden, is the same before and after.

    The model is as it was afterwards. `users_at_once` bounds the memory: so many users, each with
    `batch_rows` rows, are in one pass. `one_by_one` tunes one after the other in any case.

    Reference: Charles et al. 2024, App. G.2.
    """
    if not trainable_parameters(model):
        raise InputError("no weight of the model is trainable: say requires_grad_() for some.")
    if task is None or isinstance(task, str):
        task = named_task(task, model, tokenizer, store)
    rows = tokenise_by_record(
        store, tokenizer, sequence_length=sequence_length, encoding=task.encoding
    )
    halves = list(_halves(store, rows))
    if not halves:
        raise InputError(
            f"{store.path}: nobody has two records with something to predict, so "
            "nobody can be tuned for."
        )
    settings = _Settings(
        rows=rows,
        task=task,
        epochs=epochs,
        learning_rate=learning_rate,
        batch_rows=batch_rows,
    )
    is_adapted = adapter_layers(model) is not None
    how = "adapters" if is_adapted else "all trained weights"
    found: NDArray[np.float64] | None = None
    if is_adapted and not one_by_one and _is_next_token(task):
        with contextlib.suppress(UnstackableError):
            pieces = _similar(halves, rows, users_at_once)
            found = _tuned(model, pieces, settings, _tuned_together)
    at_once = found is not None
    if found is None:
        found = _tuned(model, [[half] for half in halves], settings, _tuned_alone)
    before, after, places = found
    measured = places > 0
    if not measured.any():
        raise InputError(f"{store.path}: nobody has anything to predict in their second half.")
    return Personalization(
        before=before[measured] / places[measured],
        after=after[measured] / places[measured],
        left_out=store.num_users - int(measured.sum()),
        how=how + (", many users at once" if at_once else ", one user after the other"),
    )


@dataclass(frozen=True, kw_only=True)
class _Half:
    """The rows of a user's two halves. `number` counts those who have two halves."""

    pseudonym: bytes
    number: int
    tune: NDArray[np.int64]
    measure: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class _Settings:
    rows: TokenRows
    task: Task
    epochs: int
    learning_rate: float
    batch_rows: int


def _halves(store: UserStore, rows: TokenRows) -> Iterator[_Half]:
    """The two halves of every user who has two records, the earlier records first."""
    record_of_row = np.asarray(rows.owners)
    starts: list[int] = np.searchsorted(record_of_row, np.arange(store.num_records + 1)).tolist()
    number = 0
    for user, pseudonym in enumerate(store.pseudonyms.to_pylist()):
        # A record without anything to predict has no row.
        records = [r for r in store.records_of(user).tolist() if starts[r] < starts[r + 1]]
        if len(records) < 2:
            continue
        of = [np.arange(starts[record], starts[record + 1]) for record in records]
        half = (len(records) + 1) // 2
        yield _Half(
            pseudonym=pseudonym,
            number=number,
            tune=np.concatenate(of[:half]),
            measure=np.concatenate(of[half:]),
        )
        number += 1


def _similar(halves: Sequence[_Half], rows: TokenRows, users_at_once: int) -> list[list[_Half]]:
    """Users with about as many and as long rows together, so that little is padding."""
    lengths = np.diff(rows.indptr)
    order = sorted(
        halves, key=lambda half: (len(half.tune), len(half.measure), lengths[half.tune].max())
    )
    return [list(order[at : at + users_at_once]) for at in range(0, len(order), users_at_once)]


def _is_next_token(task: Task) -> bool:
    """Whether users can share a batch: its rows are padded on the right, and nothing is random."""
    # Not a class made from these: its batches may hold more, or be drawn.
    return type(task) in (CausalTask, ChatTask)


def _batches(
    own: Sequence[NDArray[np.int64]],
    drawn_by: Sequence[int],
    settings: _Settings,
    device: torch.device,
) -> Iterator[tuple[Batch, Tensor]]:
    """Every user's own rows, a few at a time: the batch, and which of its rows count, by user.

    A batch has as many rows of each user. Where a user has fewer, the rest is padding without a
    label and does not count. `drawn_by` is the key of what a task draws.
    """
    size = settings.batch_rows
    for begin in range(0, max(map(len, own)), size):
        parts = [one[begin : begin + size] for one in own]
        deepest = max(map(len, parts))
        chosen = np.concatenate([np.resize(p if len(p) else own[0][:1], deepest) for p in parts])
        is_real = np.concatenate([np.arange(deepest) < len(part) for part in parts])
        made = settings.task.batch(settings.rows, chosen, np.random.default_rng([*drawn_by, begin]))
        batch = on_device(made, device)
        real = torch.from_numpy(is_real).to(device)
        if not is_real.all():
            batch["labels"][~real] = IGNORED_LABEL
        yield batch, real.view(len(own), deepest)


def _key(piece: Sequence[_Half], passes: int) -> list[int]:
    """The key of what a task draws in one pass over rows: 0 where they are measured.

    It is the same before and after tuning, and whoever else is in the store. Users whose task draws
    something are alone in a batch.
    """
    return [_SEED, int.from_bytes(piece[0].pseudonym, "little"), passes]


def _sgd(
    model: nn.Module, weights: Sequence[Tensor], piece: Sequence[_Half], settings: _Settings
) -> None:
    """Epochs of SGD on the first half of each user; `weights` are changed in place.

    A batch's loss is the mean over its rows. The sum of the users' losses is differentiated: each
    depends on that user's weights alone.
    """
    device = weights[0].device
    for epoch in range(settings.epochs):
        own = [half.tune for half in piece]
        for batch, is_real in _batches(own, _key(piece, 1 + epoch), settings, device):
            losses = settings.task.record_loss(model, batch).view(is_real.shape)
            means = (losses * is_real).sum(1) / is_real.sum(1).clamp(min=1)
            gradients = torch.autograd.grad(means.sum(), list(weights))
            with torch.no_grad():
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight -= settings.learning_rate * gradient


@torch.no_grad()
def _losses(model: nn.Module, piece: Sequence[_Half], settings: _Settings) -> NDArray[np.float64]:
    """Each user's sum of losses over the second half, and how many places were predicted there."""
    device = next(model.parameters()).device
    found = np.zeros((2, len(piece)))
    for batch, _ in _batches([half.measure for half in piece], _key(piece, 0), settings, device):
        logits, targets = settings.task.predictions(model, batch)
        losses = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
        ).double()
        predicted = (targets != IGNORED_LABEL).flatten().double()
        by_user = torch.stack((losses, predicted)).view(2, len(piece), -1).sum(2)
        found += by_user.cpu().numpy()
    return found


TuneUsers = Callable[[nn.Module, Sequence[_Half], _Settings], NDArray[np.float64]]


def _tuned(
    model: nn.Module, pieces: Sequence[Sequence[_Half]], settings: _Settings, tune: TuneUsers
) -> NDArray[np.float64]:
    """What `tune` finds of every user, a few users at a time."""
    found = np.zeros((3, sum(map(len, pieces))))
    with measuring(model), torch.enable_grad():
        for piece in pieces:
            found[:, [half.number for half in piece]] = tune(model, piece, settings)
    return found


def _tuned_alone(
    model: nn.Module, piece: Sequence[_Half], settings: _Settings
) -> NDArray[np.float64]:
    """Loss before, loss after and places of one user; the weights are put back."""
    weights = list(trainable_parameters(model).values())
    own = [weight.detach().clone() for weight in weights]
    try:
        before, places = _losses(model, piece, settings)
        _sgd(model, weights, piece, settings)
        return np.stack([before, _losses(model, piece, settings)[0], places])
    finally:
        with torch.no_grad():
            for weight, value in zip(weights, own, strict=True):
                weight.copy_(value)


def _tuned_together(
    model: nn.Module, piece: Sequence[_Half], settings: _Settings
) -> NDArray[np.float64]:
    """Losses before, losses after and places of many users, each with adapters of their own."""
    weights = {
        name: weight.detach()[None].repeat(len(piece), 1, 1).requires_grad_()
        for name, weight in trainable_parameters(model).items()
    }
    with stacked(model, weights):
        before, places = _losses(model, piece, settings)
        _sgd(model, list(weights.values()), piece, settings)
        return np.stack([before, _losses(model, piece, settings)[0], places])
