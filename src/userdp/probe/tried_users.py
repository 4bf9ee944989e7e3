"""The made-up users that a model is tried with before it is trained."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from userdp.clipping.batches.users import PADDING, is_padded
from userdp.clipping.checks.made_up import MadeUp
from userdp.losses import IGNORED_LABEL

Group = dict[str, Tensor]


class TriedUsers:
    """A cohort of made-up users, and the extra ones that join it."""

    def __init__(self, made_up: MadeUp, *, longest: int, group_size: int) -> None:
        self._made_up = made_up
        self.longest = longest if made_up.has_tokens else 1
        self.rows = max(1, min(2, group_size))
        self._group_size = group_size

    def group(self, rows: int, length: float, seed: int) -> Group:
        """The rows of one user, at most as long as allowed."""
        return self._made_up.group(rows, max(1, min(self.longest, math.ceil(length))), seed=seed)

    def cohort(self) -> list[Group]:
        """Users of different lengths, one of them only a few tokens long."""
        longest, rows = self.longest, self.rows
        sizes = [(1, longest / 2), (rows, 3), (1, longest / 4 + 1)]
        return [self.group(r, length, 10 + i) for i, (r, length) in enumerate(sizes)]

    def extras(self, thorough: bool) -> Iterator[tuple[str, Group]]:
        """The users that join the cohort, one at a time, and what is special about each."""
        yield "a long user", self.group(self.rows, self.longest, 101)
        yield "a short user", self.group(1, 2, 102)
        # It may share a batch with a user of one record less, who then has a row of padding.
        yield "a user of one record more", self.group(min(self.rows + 1, self._group_size), 3, 109)
        for times in (1e4, 1e8) if self._made_up.has_fractions else ():
            large = self.group(1, self.longest, 110)
            yield (
                f"a user of numbers {times:g} times as large",
                {
                    name: tensor * times if tensor.is_floating_point() else tensor
                    for name, tensor in large.items()
                },
            )
        if not thorough:
            return
        yield "a user with as many records as may be", self.group(self._group_size, 5, 103)
        yield "a user without records", self.group(0, 4, 104)
        if "labels" in self._made_up.tensors and self._made_up.has_tokens:
            silent = self.group(1, self.longest, 105)
            none = torch.full_like(silent["labels"], IGNORED_LABEL)
            yield "a user without labels", silent | {"labels": none}
            yield "a user of records of unlike length", self._ragged(self.rows, 108)

    def _ragged(self, rows: int, seed: int) -> Group:
        """A group of rows of different lengths: all rows but the first have two tokens."""
        group = self.group(rows, self.longest, seed)
        for name, tensor in group.items():
            if is_padded(name, tensor):
                tensor[1:, 2:] = PADDING[name]
        return group
