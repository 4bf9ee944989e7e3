"""The weighted mean of users who are close to others, and how close all of them are.

One user goes through the model at a time (`plain`), and every clipped gradient is kept as whole
numbers (`halting.GRID`). So distances are exact: whether two users are close depends on these two
alone, whoever else is there, and in whatever order.

Everything here is secret: the score and the sum, until noise is added.
Reference: Chua et al. 2024, Alg. 3, lines 8 to 13.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from userdp.clipping.flat import Apart, ClippedSum, FlatBuffer
from userdp.clipping.layer_groups import Layers
from userdp.clipping.plain import Failures, PlainClipping, clip_update
from userdp.clipping.rules import ClipRule
from userdp.losses import Batch, records_in
from userdp.updates.halting import GRID, HaltingTest

_LOG = logging.getLogger(__name__)
# Users compared at a time: bounds the memory for numbers in float64.
_BLOCK = 128


class FilteredClipping:
    """Computes N times the weighted mean of a cohort's clipped updates, and their score.

    Whether users are close is asked of all of them. Where several ranks share a cohort
    (`is_shared`), a sum therefore has its updates `apart`, and `of_all` takes those of all ranks.
    """

    def __init__(
        self,
        plain: PlainClipping,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        test: HaltingTest,
        *,
        is_shared: bool = False,
    ) -> None:
        self._plain = plain
        self._parameters = list(parameters)
        self._test = test
        self._is_shared = is_shared
        self.skip_failing = False
        self.differs = False
        self._layers = Layers(model, parameters)
        self._num_values = sum(parameter.numel() for parameter in self._parameters)
        _LOG.warning(test.check_memory(self._num_values))

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the next sum depends on its groups and the weights alone."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is nothing to go on from."""

    def clipped_sum(self, groups: Iterable[Batch], rule: ClipRule) -> ClippedSum:
        """N times the weighted mean, and the score. Secret."""
        kept: list[Tensor] = []
        places: list[int] = []
        failures, count = Failures(self.skip_failing), 0
        for place, group in enumerate(groups):
            if not records_in(group):
                continue
            count += 1
            # `of_all` counts no more than these.
            if len(kept) == self._test.num_users:
                continue
            with failures.of_one_group():
                clipped = clip_update(self._plain.update(group), rule, layers=self._layers.by(rule))
                kept.append(_whole_numbers(clipped, rule.bound))
                places.append(place)
        failures.warn_if_all_failed(count)
        users = torch.stack(kept) if kept else torch.zeros((0, self._num_values), dtype=torch.int32)
        if not self._is_shared:
            return self.of_all(users, count, rule)
        return ClippedSum(
            total=FlatBuffer(self._parameters),
            num_within=torch.tensor(0),
            num_updates=count,
            apart=Apart(
                users_UP=users,
                places=tuple(places),
                of_all=lambda all_users, in_all: self.of_all(all_users, in_all, rule),
            ),
        )

    def of_all(self, users_UP: Tensor, count: int, rule: ClipRule) -> ClippedSum:
        """The mean and the score of these updates, which are in the cohort's order.

        Beyond the public number of users nobody counts. Another user in front then takes the place
        of the last one.
        """
        users_UP = users_UP[: self._test.num_users]
        total = FlatBuffer(self._parameters)
        score = 0.0
        if len(users_UP):
            close, near = neighbours(users_UP, self._test.concentration * GRID)
            score = float(close.sum()) / self._test.num_users
            mean = _weighted_mean(users_UP, [self._test.weight(int(n)) for n in near])
            scale = rule.bound / GRID * self._test.num_users
            pieces = torch.split(mean * scale, [view.numel() for view in total.views])
            for view, piece in zip(total.views, pieces, strict=True):
                view.copy_(piece.view(view.shape))
        return ClippedSum(
            total=total, num_within=torch.tensor(0), num_updates=count, concentration=score
        )


def _whole_numbers(update: Sequence[Tensor], bound: float) -> Tensor:
    """One update as multiples of bound / GRID, in four bytes each."""
    flat = torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in update])
    return (flat * (GRID / bound)).round().to(torch.int32).cpu()


def neighbours(users_UP: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """How many users are within `radius` of each user, and within twice `radius`, itself included.

    Rows are users, in whole numbers with norms of about `GRID`. All products and their sums are
    whole numbers below 2^53, so float64 holds them exactly in whatever order they are added.
    """
    count = len(users_UP)
    close = torch.zeros(count, dtype=torch.int64)
    near = torch.zeros(count, dtype=torch.int64)
    squares = torch.cat(
        [block.to(torch.float64).square().sum(1) for block in users_UP.split(_BLOCK)]
    )
    for start in range(0, count, _BLOCK):
        some = slice(start, start + _BLOCK)
        ours = users_UP[some].to(torch.float64)
        for first in range(0, count, _BLOCK):
            others = slice(first, first + _BLOCK)
            products = ours @ users_UP[others].to(torch.float64).T
            squared = squares[some, None] + squares[None, others] - 2 * products
            close[some] += (squared <= radius**2).sum(1)
            near[some] += (squared <= (2 * radius) ** 2).sum(1)
    return close, near


def _weighted_mean(users_UP: Tensor, weights: Sequence[int]) -> Tensor:
    """The mean of the users with these weights; zero if all weights are zero."""
    total = sum(weights)
    mean = torch.zeros(users_UP.shape[1], dtype=torch.float64)
    if not total:
        return mean
    chosen = torch.tensor(weights, dtype=torch.float64)
    for part, block in zip(chosen.split(_BLOCK), users_UP.split(_BLOCK), strict=True):
        mean += part @ block.to(torch.float64)
    return mean / total
