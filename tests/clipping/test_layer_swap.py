"""Layers that compute with another forward for a while: the model object stays what it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from userdp.clipping.execute.layer_swap import Tape, only, swapped
from userdp.errors import MixedExamplesError


class Doubled:
    """A rule whose forward doubles the layer's output and notes how many rows it saw."""

    @staticmethod
    def forward(layer: Any, x: Tensor) -> Tensor:
        layer.userdp_tape.rows = len(x)
        return 2 * nn.functional.linear(x, layer.weight, layer.bias)


def test_inside_the_rule_computes_and_afterwards_the_layer_itself() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(5, 3)
    tape = Tape(users=5, rows=0)
    names, before = set(layer.__dict__), layer(x)
    with swapped([(layer, Doubled)], {layer: tape}):
        assert isinstance(layer, nn.Linear)
        assert torch.equal(layer(x), 2 * before)
    assert tape.rows == 5
    assert type(layer) is nn.Linear
    assert set(layer.__dict__) == names
    assert torch.equal(layer(x), before)


def test_layers_are_put_back_after_an_error() -> None:
    layer = nn.Linear(3, 2)
    with (
        pytest.raises(ZeroDivisionError),
        swapped([(layer, Doubled)], {layer: Tape(users=1, rows=1)}),
    ):
        raise ZeroDivisionError
    assert type(layer) is nn.Linear
    assert "userdp_tape" not in layer.__dict__


def test_a_forward_on_the_object_is_refused_and_the_layers_before_it_are_put_back() -> None:
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    second.forward = lambda x: x  # type: ignore[method-assign]
    tapes: dict[nn.Module, Tape] = {first: Tape(users=1, rows=1), second: Tape(users=1, rows=1)}
    with (
        pytest.raises(MixedExamplesError, match="replaced on the object"),
        swapped([(first, Doubled), (second, Doubled)], tapes),
    ):
        pass
    assert type(first) is type(second) is nn.Linear
    assert "userdp_tape" not in first.__dict__


def test_the_one_tensor_of_a_call_may_be_named() -> None:
    x = torch.ones(1)
    assert only((x,), {}) is only((), {"input": x}) is x
    with pytest.raises(ValueError, match="too many"):
        only((x,), {"input": x})
