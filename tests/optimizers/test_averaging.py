"""The average of the weights, against the sum written out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from userdp.errors import InputError
from userdp.optimizers.averaging import WeightAverage, restore_average

DECAY = 0.9


def walk(dtype: torch.dtype, steps: int = 7) -> tuple[nn.Linear, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(3, 4, generator=generator).to(dtype) for _ in range(steps)]
    return nn.Linear(4, 3, bias=False).to(dtype), values


def averaged(dtype: torch.dtype) -> tuple[nn.Linear, list[torch.Tensor], WeightAverage]:
    model, values = walk(dtype)
    average = WeightAverage(model, decay=DECAY)
    for value in values:
        with torch.no_grad():
            model.weight.copy_(value)
        average.update()
    return model, values, average


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_average_is_the_weighted_sum_of_the_weights_after_each_step(dtype: torch.dtype) -> None:
    model, values, average = averaged(dtype)
    shares = [DECAY ** (len(values) - 1 - i) for i in range(len(values))]
    total = sum(share * value.double() for share, value in zip(shares, values, strict=True))
    average.put_into_model()
    expected = (total / sum(shares)).to(dtype)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(model.weight.detach(), expected, rtol=tolerance, atol=tolerance)


def test_average_is_kept_wider_than_bfloat16() -> None:
    # Steps this small are lost if the average is rounded to bfloat16 each time.
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    average = WeightAverage(model, decay=0.999)
    for step in range(400):
        nn.init.constant_(model.weight, 1.0 if step < 200 else 2.0)
        average.update()
    average.put_into_model()
    shares = torch.tensor([0.999 ** (399 - i) for i in range(400)], dtype=torch.float64)
    expected = (shares[:200].sum() + 2 * shares[200:].sum()) / shares.sum()
    assert model.weight.item() == pytest.approx(expected.item(), abs=2**-8)


def test_average_goes_on_from_its_state_bit_for_bit() -> None:
    whole, values, average = averaged(torch.float32)
    average.put_into_model()
    model, _ = walk(torch.float32)
    first = WeightAverage(model, decay=DECAY)
    second = WeightAverage(model, decay=DECAY)
    for number, value in enumerate(values):
        with torch.no_grad():
            model.weight.copy_(value)
        if number < 3:
            first.update()
        if number == 3:
            restore_average(second, first.state_dict())
        if number >= 3:
            second.update()
    second.put_into_model()
    assert torch.equal(model.weight, whole.weight)


def test_an_average_with_another_decay_begins_anew() -> None:
    model, _, average = averaged(torch.float32)
    other = WeightAverage(model, decay=0.5)
    restore_average(other, average.state_dict())
    restore_average(other, None)
    assert other.state_dict()["updates"] == 0
    before = model.weight.detach().clone()
    other.put_into_model()
    assert torch.equal(model.weight, before)


def test_other_weights_and_decays_are_refused() -> None:
    model, _, average = averaged(torch.float32)
    other = WeightAverage(nn.Linear(4, 3), decay=DECAY)
    with pytest.raises(InputError, match="other weights"):
        other.load_state_dict(average.state_dict())
    for decay in (0.0, 1.0, float("nan")):
        with pytest.raises(InputError, match="between 0 and 1"):
            WeightAverage(model, decay=decay)
