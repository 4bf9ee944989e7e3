"""What a model keeps between forward passes is noticed and put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import families
from userdp.module_state import ModuleState


class Remembers(nn.Module):
    """Keeps what it saw in every place that a module has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("saved", torch.zeros(2))
        self.register_buffer("not_saved", torch.zeros(2), persistent=False)
        self.attribute = torch.zeros(2)
        self.count = 0
        self.seen: list[Any] = []
        self.by_name: dict[str, Any] = {"last": None, "tensor": torch.zeros(2)}

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


WRITES = {
    "buffer in place": lambda m: m.saved.add_(1),
    "buffer replaced": lambda m: setattr(m, "not_saved", torch.ones(2)),
    "buffer added": lambda m: m.register_buffer("more", torch.ones(2)),
    "tensor in place": lambda m: m.attribute.add_(1),
    "tensor replaced": lambda m: setattr(m, "attribute", torch.ones(2)),
    "buffer through its data": lambda m: m.saved.data.add_(1),
    "tensor through its data": lambda m: m.attribute.data.add_(1),
    "number": lambda m: setattr(m, "count", 1),
    "list": lambda m: m.seen.append(torch.ones(2)),
    "dictionary": lambda m: m.by_name.update(last=3),
    "tensor in a dictionary": lambda m: m.by_name["tensor"].add_(1),
    "attribute added": lambda m: setattr(m, "cache", torch.ones(2)),
    "below": lambda m: setattr(m.inner, "calls", 1),
    "attribute removed": lambda m: delattr(m, "count"),
}


@pytest.mark.parametrize("kind", WRITES)
def test_noticed_and_put_back(kind: str) -> None:
    model = Remembers()
    state = ModuleState(model)
    assert state.changed() == []
    for _ in range(2):
        WRITES[kind](model)
        assert state.changed()
        state.restore()
        assert state.changed() == []
        assert torch.equal(model.saved, torch.zeros(2))  # type: ignore[arg-type]
        assert torch.equal(model.not_saved, torch.zeros(2))  # type: ignore[arg-type]
        assert torch.equal(model.attribute, torch.zeros(2))
        assert torch.equal(model.by_name["tensor"], torch.zeros(2))
        assert (model.count, model.seen, model.by_name["last"]) == (0, [], None)
        assert not hasattr(model, "cache")
        assert not hasattr(model, "more")


def test_weights_and_training_mode_are_not_its_business() -> None:
    model = Remembers()
    state = ModuleState(model)
    model.train(False)
    with torch.no_grad():
        model.inner.weight.zero_()
    assert state.changed() == []


def test_growing_rotary_embeddings_are_named() -> None:
    model = families.build(families.PLAIN_ONLY["llama, dynamic rotation"])
    state = ModuleState(model)
    model(input_ids=torch.zeros(1, 30, dtype=torch.int64))
    assert "model.rotary_emb.inv_freq" in state.changed()
    state.restore()
    assert state.changed() == []


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int8])
def test_buffers_of_any_dtype_are_watched(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("kept", torch.zeros(3).to(dtype), persistent=False)
    state = ModuleState(model)
    assert state.changed() == []
    model.kept.data[1] = torch.ones(()).to(dtype)  # type: ignore[index]
    assert state.changed() == ["kept"]
    state.restore()
    assert state.changed() == []


def test_a_buffer_of_nan_is_equal_to_itself() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("kept", torch.full((2,), float("nan")))
    assert ModuleState(model).changed() == []


def test_listed_weights_keep_what_the_optimizer_wrote() -> None:
    # An LSTM keeps its weights in a list, too. Putting them back would undo every step.
    model = nn.LSTM(2, 2)
    state = ModuleState(model)
    before = [weight.detach().clone() for weight in model.parameters()]
    with torch.no_grad():
        for weight in model.parameters():
            weight += 1.0
    assert state.changed() == []
    state.restore()
    for weight, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(weight, old + 1.0)


def test_a_listed_tensor_that_is_no_weight_is_put_back() -> None:
    model: Any = nn.Linear(2, 2)
    model.kept = [torch.zeros(2), model.weight]
    state = ModuleState(model)
    model.kept[0] += 1.0
    assert state.changed() == ["kept"]
    state.restore()
    assert torch.equal(model.kept[0], torch.zeros(2))


def test_what_was_made_in_inference_mode_is_put_back() -> None:
    model = nn.Linear(2, 2)
    with torch.inference_mode():
        model.register_buffer("longest", torch.tensor(3.0))
    state = ModuleState(model)
    with torch.inference_mode():
        model.longest.add_(4.0)  # type: ignore[operator]
    state.restore()
    assert float(model.longest) == 3.0  # type: ignore[arg-type]
