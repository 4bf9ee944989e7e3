"""When sums get their noise, and what the noise remembers with and without shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks_runner import answers
from userdp import holding
from userdp.clipping.flat import ClippedSum, FlatBuffer
from userdp.errors import InputError
from userdp.holding import Release, WholeWeights, apart, joined
from userdp.noise import draw
from userdp.noise.banded import Banded
from userdp.noise.contract import Noise
from userdp.noise.gaussian import Gaussian
from userdp.ranks import Ranks
from userdp.sharding.pieces import check_drawn_by_position
from userdp.streams import RunSecret, Streams

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


@dataclass(frozen=True, kw_only=True)
class FromTheFirst(Noise):
    """A noise of another package, which does not look at where its part begins."""

    name: ClassVar[str] = "toy-first"
    title: ClassVar[str] = "from the first number on"

    def add_(
        self,
        values: Tensor,
        *,
        offset: int,
        size: int,
        noise_stddev: float,
        step: int,
        streams: Streams,
    ) -> None:
        values += torch.from_numpy(streams.rng(step).standard_normal(len(values))) * noise_stddev

    @property
    def words(self) -> str:
        return ""


# Numbers of the sum, in parts of eight: the last part is shorter.
SIZE, PART = 30, 8
NOISES = {
    "gaussian": Gaussian(noise_multiplier=1.0),
    "another's": FromTheFirst(noise_multiplier=1.0),
    "banded": Banded(noise_multiplier=1.0, bands=3, steps=4, strategy="toeplitz"),
}


def noised(rank: int, noise: Noise) -> tuple[Tensor, list[str]]:
    """The gradients of a sum, and what happened in which order."""
    parameter = torch.nn.Parameter(torch.zeros(SIZE))
    happened: list[str] = []

    def noted(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *a, **k: happened.append(what) or function(*a, **k)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw, "PIECE", PART)
        patch.setattr(holding, "PIECE", PART)
        weights = WholeWeights([parameter], noise, Ranks.found())
        kind = type(weights._noise)
        patch.setattr(dist, "all_reduce", noted("sent", dist.all_reduce))
        patch.setattr(kind, "add_", noted("noised", kind.add_))
        sums = FlatBuffer([parameter])
        # Thirds are rounded, so that another sum would show.
        share = torch.arange(SIZE) / 3
        sums.values[:SIZE] = share * (1 + rank) if dist.is_initialized() else share + share * 2
        total = ClippedSum(total=sums, num_within=torch.tensor(0), num_updates=1, weight=1.0)
        streams = RunSecret.fixed_for_tests(1).streams("noise")
        weights.set_gradients(
            total, Release(scale=0.7, noise_stddev=0.1, divisor=3.0, step=0, streams=streams)
        )
    assert parameter.grad is not None
    return parameter.grad.clone(), happened


def test_parts_of_the_sum_get_their_noise_while_others_are_on_their_way() -> None:
    found = {name: answers(2, partial(noised, noise=noise)) for name, noise in NOISES.items()}
    for name, ranks in found.items():
        alone, _ = noised(0, NOISES[name])
        for gradient, happened in ranks:
            assert torch.equal(gradient, alone)
            # All parts are sent before the first gets its noise. What remembers noises all at once,
            # and so does what may not draw by position: parts must not get the same numbers.
            parts = 4 if name == "gaussian" else 1
            assert happened == ["sent"] * parts + ["noised"] * parts


def test_with_shards_a_noise_that_is_not_drawn_by_position_is_refused() -> None:
    check_drawn_by_position(NOISES["gaussian"])
    check_drawn_by_position(NOISES["banded"])
    with pytest.raises(InputError, match="draws other numbers for a part"):
        check_drawn_by_position(NOISES["another's"])
