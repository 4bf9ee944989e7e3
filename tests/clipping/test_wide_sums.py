"""Sums of half-precision updates are kept in float32: in bfloat16, 256 + 1 is 256."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from userdp.clipping.fast import FastClipping
from userdp.clipping.plain import PlainClipping
from userdp.clipping.rules import FlatClip
from userdp.losses import Batch

USERS = 600


def linear_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"])[:, 0]


@pytest.mark.parametrize("clipping", ["fast", "plain"])
def test_sums_of_half_precision_models_are_in_float32(clipping: str) -> None:
    model = nn.Linear(2, 1, bias=False).to(torch.bfloat16)
    rule = FlatClip(clip_norm=1.0)
    parameters = list(model.parameters())
    clipper = (
        FastClipping(model, parameters, rule, record_loss=linear_loss)
        if clipping == "fast"
        else PlainClipping(model, parameters, record_loss=linear_loss)
    )
    one: Batch = {"x": torch.tensor([[4.0, 0.0]], dtype=torch.bfloat16)}

    def summed(users: int) -> Tensor:
        (total,) = clipper.clipped_sum([one] * users, rule).total.views
        return total.clone()

    everybody = summed(USERS)
    assert everybody.dtype == torch.float32
    assert float(everybody[0, 0]) == pytest.approx(USERS, rel=1e-5)
    # And one user fewer is seen: neither lost in rounding nor rounded up to more than one.
    assert float((everybody - summed(USERS - 1)).norm()) == pytest.approx(1.0, rel=1e-3)
