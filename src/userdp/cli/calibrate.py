"""`userdp calibrate`: the least noise that meets a target epsilon."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from userdp import plan
from userdp.accounting import accountant, events
from userdp.cli import common
from userdp.noise.gaussian import Gaussian
from userdp.statement import round_up
from userdp.units import Adjacency, SamplingUnit


def calibrate(
    rate: common.Rate,
    steps: common.Steps,
    epsilon: Annotated[float, typer.Option(help="Target epsilon; the result is at most this.")],
    delta: common.Delta,
    unit: common.Unit = SamplingUnit.USER,
    group_size: common.GroupSize = 1,
    adjacency: common.AdjacencyOption = Adjacency.ADD_REMOVE,
    json: common.Json = False,
) -> None:
    """Find the least noise multiplier at which a run costs at most epsilon."""
    common.check_steps(steps)
    start = time.perf_counter()
    sampler = common.sampler_of(unit, rate, group_size)
    noise_multiplier = plan.calibrate(
        sampler, steps=steps, epsilon=epsilon, delta=delta, adjacency=adjacency
    )
    event = events.repeated(
        plan.step_event(sampler, Gaussian(noise_multiplier=noise_multiplier)), steps
    )
    reached = accountant.epsilon(event, delta=delta, adjacency=adjacency)
    common.emit(
        json,
        {
            "noise_multiplier": noise_multiplier,
            "epsilon": reached,
            "delta": delta,
            "adjacency": adjacency.value,
            "unit": unit.value,
            "protects": "user",
            "certified_by": accountant.certified_by(),
            "seconds": time.perf_counter() - start,
        },
        f"noise_multiplier={noise_multiplier:.5g}\n"
        f"(epsilon={round_up(reached):g}, delta={delta:g}), user-level, {adjacency.value}, "
        f"{steps:,} steps, Poisson sampling of {unit.value}s at rate {rate:g}\n"
        f"certified by {accountant.certified_by()}",
    )
