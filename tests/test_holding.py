"""What a noise remembers is the same whether the weights are whole or sharded."""

from __future__ import annotations

import pytest
import torch

from userdp.clipping.flat import FlatBuffer
from userdp.holding import apart, joined
from userdp.noise.banded import Banded
from userdp.streams import RunSecret

PARAMETERS = [torch.zeros(5, 3), torch.zeros(2), torch.zeros(7, 1)]


@pytest.mark.parametrize("strategy", ["optimised", "inverse-square-root", "buffered"])
@pytest.mark.parametrize("steps", [0, 2])
def test_noise_goes_on_alike_from_vectors_of_the_buffer_and_of_each_parameter(
    strategy: str, steps: int
) -> None:
    noise = Banded(noise_multiplier=1.0, bands=3, steps=5, strategy=strategy)  # type: ignore[arg-type]
    streams = RunSecret.fixed_for_tests(2).streams("noise")
    layout = FlatBuffer(PARAMETERS, on="meta")

    def added(running: object, step: int) -> list[torch.Tensor]:
        total = FlatBuffer(PARAMETERS)
        running.add_(  # type: ignore[attr-defined]
            total.values,
            offset=0,
            size=len(total.values),
            noise_stddev=0.5,
            step=step,
            streams=streams,
        )
        return [view.clone() for view in total.views]

    first = noise.started()
    for step in range(steps):
        added(first, step)
    state = first.state_dict()
    by_parameter = apart(state, layout)
    assert {"offset", "held"}.isdisjoint(by_parameter)
    second = noise.started()
    second.load_state_dict(joined(by_parameter, layout))
    for step in range(steps, 5):
        for own, other in zip(added(first, step), added(second, step), strict=True):
            assert torch.equal(own, other)
