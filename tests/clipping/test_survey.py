"""Layers that the fast path cannot tell rows or weights of are refused by name."""

from __future__ import annotations

import pytest
import torch
from comparing import (
    RAGGED,
    assert_same_as_plain,
    cohort,
    fast_sum,
)
from test_own_models import COHORTS, RULE, WIDTH, Around, Attention, around
from torch import Tensor, nn

from userdp.errors import MixedExamplesError


class Table(nn.Module):
    """A layer applied to positions alone: every row uses its one output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.linspace(0, 1, 2 * x.shape[1], dtype=x.dtype).view(-1, 2)
        return x + self.layer(places)


class FlatPositions(nn.Module):
    """Positions (tokens,) without a dimension for rows."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.positions(torch.arange(x.shape[1]))


class TokensFirst(nn.Module):
    """A layer that sees (tokens, rows, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


class Folded(nn.Module):
    """A norm that first sees half rows, and whole ones in its last call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        whole = torch.cat((x, x), 1)
        halves = self.layer(whole.reshape(2 * len(x), x.shape[1], WIDTH))
        return self.layer(x + halves.view_as(whole)[:, : x.shape[1]])


class Recurrent(nn.Module):
    """A recurrent layer without a rule: its last state counts rows second."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


@pytest.mark.parametrize("lengths", COHORTS)
@pytest.mark.parametrize(
    "inner",
    [Table, FlatPositions, TokensFirst, Folded, Recurrent, lambda: Attention(batch_first=False)],
    ids=["Table", "FlatPositions", "TokensFirst", "Folded", "Recurrent", "Attention, tokens first"],
)
def test_layer_that_does_not_count_rows_first_is_refused_by_name(
    inner: type[nn.Module], lengths: str
) -> None:
    with pytest.raises(MixedExamplesError, match=r"(Linear|Norm|Embedding|GRU|MultiheadAttention)"):
        fast_sum(around(inner()), cohort(COHORTS[lengths]), RULE)


class ReadsWeight(nn.Module):
    """Multiplies by a layer's weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.layer.weight


def test_weight_that_is_read_without_calling_its_layer_is_refused_by_name() -> None:
    # One that nobody reads has no gradient, and is no reason to refuse.
    model = Around(ReadsWeight()).double()
    with pytest.raises(MixedExamplesError, match=r"'inner.layer.weight' is read without calling"):
        fast_sum(model, cohort(RAGGED), RULE)
    model.inner.layer.requires_grad_(False)
    assert_same_as_plain(model, cohort(RAGGED))
