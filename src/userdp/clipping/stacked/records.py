"""Records of several users side by side, padded to the same number and length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from userdp.clipping.batches.users import PADDING, attend_to_empty_rows, is_padded
from userdp.losses import Batch, records_in


@dataclass(frozen=True, kw_only=True)
class StackedRecords:
    """Some records of several users, padded to the same number and length."""

    tensors: dict[str, Tensor]
    counts: Sequence[int]
    counts_U: Tensor
    batch_size: int

    @staticmethod
    def of(
        users: Sequence[Batch],
        part: slice,
        batch_size: int,
        places: int,
        device: torch.device,
        lengths: dict[str, int],
    ) -> StackedRecords:
        """The users' records of this part side by side, and after them places without records."""
        counts = [len(range(*part.indices(records_in(group)))) for group in users]
        counts += [0] * (places - len(users))
        rows = -(-max(counts) // batch_size) * batch_size
        tensors: dict[str, Tensor] = {}
        for name, first in users[0].items():
            padded = name in lengths
            shape = (lengths[name], *first.shape[2:]) if padded else first.shape[1:]
            parts = [group[name][part] for group in users]
            if len(users) == places and all(some.shape == (rows, *shape) for some in parts):
                tensors[name] = torch.stack(parts).to(device)
                continue
            whole = first.new_full((places, rows, *shape), PADDING[name] if padded else 0)
            for place, (group, some) in enumerate(zip(users, parts, strict=True)):
                own = whole[place, : counts[place]]
                (own[:, : some.shape[1]] if padded else own).copy_(some)
                if not padded:
                    # A padded row must be readable: it is a copy of a row of the same user.
                    whole[place, counts[place] :] = group[name][:1]
            tensors[name] = whole.to(device)
        counts_U = torch.tensor(counts, device=device)
        attend_to_empty_rows(tensors, torch.arange(rows, device=device) >= counts_U[:, None])
        return StackedRecords(
            tensors=tensors,
            counts=counts,
            counts_U=counts_U,
            batch_size=batch_size,
        )

    @property
    def most_batches(self) -> int:
        """How many local batches the user with the most records has."""
        return next(iter(self.tensors.values())).shape[1] // self.batch_size

    def resting(self, number: int) -> int:
        """How many users have no local batch `number`. Users of fewer records stand first."""
        return sum(count <= number * self.batch_size for count in self.counts)

    def local_batch(self, number: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Local batch `number` of every user, which rows count, and which users have one."""
        first = number * self.batch_size
        rows = slice(first, first + self.batch_size)
        places = torch.arange(first, first + self.batch_size, device=self.counts_U.device)
        mask_UB = places[None, :] < self.counts_U[:, None]
        return {name: t[:, rows] for name, t in self.tensors.items()}, mask_UB, mask_UB.any(1)


def lengths_of(users: Sequence[Batch], longest: int | None) -> dict[str, int]:
    """How long the records of each padded tensor are made.

    With `longest` that is a power of two or `longest`, so that code is compiled for few lengths
    only. A model has no positions for more.
    """
    found = {
        name: max(group[name].shape[1] for group in users)
        for name, tensor in users[0].items()
        if is_padded(name, tensor)
    }
    if longest is None:
        return found
    return {
        name: max(length, min(longest, 1 << (max(length, 1) - 1).bit_length()))
        for name, length in found.items()
    }
