"""A user with one layer that is not finite is left out of all layers, not of that one alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from userdp.clipping.factors import clip_factors
from userdp.clipping.fast import FastClipping
from userdp.clipping.plain import PlainClipping
from userdp.clipping.rules import AutomaticClip, ClipRule, FlatClip, PerLayerClip
from userdp.losses import Batch

RULES = [FlatClip(clip_norm=0.5), PerLayerClip(clip_norm=0.5), AutomaticClip()]


class Apart(nn.Module):
    """Two layers that never meet: the gradient of each is the input of that layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x[:, :2])[:, 0] + self.second(x[:, 2:])[:, 0]


def group(*values: float) -> Batch:
    return {"x": torch.tensor([values])}


@pytest.mark.parametrize("clipping", ["fast", "plain"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_user_with_one_layer_that_is_not_finite_adds_nothing_to_the_others(
    rule: ClipRule, bad: float, clipping: str
) -> None:
    model = Apart()
    parameters = list(model.parameters())

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"])

    def summed(groups: list[Batch]) -> list[Tensor]:
        clipper = (
            FastClipping(model, parameters, rule, record_loss=loss)
            if clipping == "fast"
            else PlainClipping(model, parameters, record_loss=loss)
        )
        return [view.clone() for view in clipper.clipped_sum(groups, rule).total.views]

    others = [group(1.0, 2.0, 0.0, 0.1), group(0.0, 0.1, -3.0, 0.0)]
    expected = summed(others)
    found = summed([others[0], group(1.0, 1.0, bad, 0.0), others[1]])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_factors_of_such_a_user_are_zero_in_every_layer(rule: ClipRule) -> None:
    squared = torch.tensor([[1.0, 4.0, 9.0], [math.inf, 1.0, math.nan]])
    factors = clip_factors(squared, rule, margin=1e-6)
    assert factors[:, [0, 2]].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert bool((factors[:, 1] > 0).all())
