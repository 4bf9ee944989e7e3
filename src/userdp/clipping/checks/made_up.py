"""Made-up rows in the shape of real ones: a model is tried on them before it sees anybody's data.

Whether training goes on must not depend on a user's records, so no check reads their values. A
made-up batch keeps the shapes, the lengths and the set of integers that occur. It draws which
integer stands where, and all floating-point numbers, from a fixed seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from userdp.clipping.batches.joined_records import is_joined, separated
from userdp.clipping.batches.users import PADDING, Users, is_padded
from userdp.losses import (
    IGNORED_LABEL,
    JOINED_LEFT,
    JOINED_POSITION,
    JOINED_WEIGHT,
    Batch,
)

# Tensors that say where records lie, not what is in them.
_LAYOUT = {"attention_mask", JOINED_POSITION, JOINED_LEFT, JOINED_WEIGHT}


@dataclass(frozen=True, kw_only=True)
class _Values:
    """What one tensor of a batch may hold: integers from a `pool`, or floating-point numbers."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    padded: bool
    pool: Tensor | None


@dataclass(frozen=True)
class MadeUp:
    """Makes groups like an example, with any number of rows of any length."""

    tensors: Mapping[str, _Values]
    # Whether each token is its own label.
    labels_are_ids: bool = False

    @staticmethod
    def tokens(vocabulary: int) -> MadeUp:
        """Token ids below `vocabulary`, each its own label, as causal language models take them."""
        values = _Values(
            dtype=torch.int64,
            shape=(),
            padded=True,
            pool=torch.arange(vocabulary, dtype=torch.int64),
        )
        return MadeUp({"input_ids": values, "labels": values}, labels_are_ids=True)

    @staticmethod
    def like(example: Batch) -> MadeUp:
        """Integers that occur in the example's tensors; floating-point numbers are drawn."""
        found: dict[str, _Values] = {}
        for name, tensor in example.items():
            padded = is_padded(name, tensor)
            found[name] = _Values(
                dtype=tensor.dtype,
                shape=tuple(tensor.shape[2 if padded else 1 :]),
                padded=padded,
                pool=None if tensor.is_floating_point() else _pool(name, tensor),
            )
        return MadeUp(found)

    @property
    def has_tokens(self) -> bool:
        """Whether rows are sequences, which may be of any length."""
        return any(values.padded for values in self.tensors.values())

    @property
    def has_fractions(self) -> bool:
        """Whether rows hold floating-point numbers, which may be of any size."""
        return any(values.pool is None for values in self.tensors.values())

    def group(self, rows: int, length: int, *, seed: int) -> dict[str, Tensor]:
        """One user's rows, all of this length and, where labels are classes, of one class.

        Gradients of different classes may almost cancel. What is left of them is mostly rounding.
        """
        generator = torch.Generator().manual_seed(seed)
        found: dict[str, Tensor] = {}
        for name, values in self.tensors.items():
            shape = (rows, *((length,) if values.padded else ()), *values.shape)
            found[name] = _drawn(shape, values.dtype, values.pool, generator)
            if name == "labels" and not values.padded:
                found[name][1:] = found[name][:1]
        if "attention_mask" in found:
            found["attention_mask"] = torch.ones_like(found["attention_mask"])
        if self.labels_are_ids:
            found["labels"] = found["input_ids"].clone()
        return found


def disguised(users: Users, *, seed: int = 0) -> Users:
    """The batch with made-up values in the same layout: the same rows, lengths and labelled places.

    A row ends with its last label or its last place in the attention mask. Only half of the
    integers that occur are used, a different half for another seed, because some integer may have
    no finite loss. All records of a user have the same class, as in `MadeUp.group`.
    """
    generator = torch.Generator().manual_seed(seed)
    ends = row_ends(users.batch)
    batch: dict[str, Tensor] = {}
    for name, tensor in users.batch.items():
        if name in _LAYOUT:
            batch[name] = tensor
            continue
        pool = None if tensor.is_floating_point() else _half(_pool(name, tensor), generator)
        values = _drawn(tuple(tensor.shape), tensor.dtype, pool, generator).to(tensor.device)
        if is_padded(name, tensor):
            outside = torch.arange(tensor.shape[1], device=tensor.device) >= ends[:, None]
            outside = outside.view(*outside.shape, *(1 for _ in tensor.shape[2:]))
            values = torch.where(outside, PADDING[name], values)
        if name == "labels":
            if tensor.dim() == 1:
                for user in range(users.count):
                    start, stop = users.rows_of(user)
                    values[start:stop] = values[start]
            values = torch.where(tensor == IGNORED_LABEL, tensor, values)
        batch[name] = values
    return replace(users, batch=batch)


def own_groups(users: Users, wanted: Sequence[int]) -> list[dict[str, Tensor]]:
    """The rows of some users of a batch, each user's alone and padded to its own length only."""
    ends = row_ends(users.batch)
    found: list[dict[str, Tensor]] = []
    for user in wanted:
        start, stop = users.rows_of(user)
        count = int((users.weights[start:stop] > 0).sum())
        own = {name: tensor[start : start + count] for name, tensor in users.batch.items()}
        if count and is_joined(own):
            own = separated(own)
        elif count:
            length = max(1, int(ends[start : start + count].max()))
            own = {
                name: tensor[:, :length] if is_padded(name, tensor) else tensor
                for name, tensor in own.items()
            }
        found.append(own)
    return found


def row_ends(batch: Batch) -> Tensor:
    """How many places of each row belong to a record; all of them if no tensor tells."""
    first = next(iter(batch.values()))
    lengths = [tensor.shape[1] for name, tensor in batch.items() if is_padded(name, tensor)]
    length = max(lengths, default=1)
    used: list[Tensor] = []
    if "labels" in batch and batch["labels"].dim() > 1:
        used.append(batch["labels"] != IGNORED_LABEL)
    if "attention_mask" in batch:
        used.append(batch["attention_mask"] > 0)
    if JOINED_LEFT in batch:
        used.append(batch[JOINED_LEFT] >= 0)
    if not used:
        return torch.full((len(first),), length, device=first.device)
    places = torch.arange(1, length + 1, device=first.device)
    return torch.stack([torch.where(mask, places, 0).amax(1) for mask in used]).amax(0)


def _pool(name: str, tensor: Tensor) -> Tensor:
    # By numpy: torch's took a fifth of a second for a batch, on a machine of 16 cores.
    values = torch.from_numpy(np.unique(tensor.detach().cpu().numpy()))
    if name == "labels" and bool((values != IGNORED_LABEL).any()):
        values = values[values != IGNORED_LABEL]
    return values


def _half(pool: Tensor, generator: torch.Generator) -> Tensor:
    """A random half of the values; all of them if they are fewer than 8."""
    if len(pool) < 8:
        return pool
    return pool[torch.randperm(len(pool), generator=generator)[: len(pool) // 2]]


def _drawn(
    shape: tuple[int, ...], dtype: torch.dtype, pool: Tensor | None, generator: torch.Generator
) -> Tensor:
    if pool is None:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if not len(pool):
        return torch.zeros(shape, dtype=dtype)
    return pool[torch.randint(len(pool), shape, generator=generator)].to(dtype)
