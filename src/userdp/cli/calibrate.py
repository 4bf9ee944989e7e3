"""`userdp calibrate`: the least noise that meets a target epsilon."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from userdp.cli import common, mechanism
from userdp.cli.mechanism import AccountantName, NoiseKind
from userdp.units import Adjacency, SamplingUnit


def calibrate(
    epsilon: Annotated[float, typer.Option(help="Target epsilon; the result is at most this.")],
    delta: common.Delta,
    rate: mechanism.OptionalRate = None,
    steps: mechanism.OptionalSteps = None,
    unit: common.Unit = SamplingUnit.USER,
    group_size: common.GroupSize = 1,
    adjacency: common.AdjacencyOption = Adjacency.ADD_REMOVE,
    cap: mechanism.Cap = None,
    users: mechanism.Users = None,
    accountant: mechanism.Accountant = AccountantName.PLD,
    noise: mechanism.Noise = NoiseKind.GAUSSIAN,
    participations: mechanism.Participations = None,
    json: common.Json = False,
) -> None:
    """Find the least noise multiplier at which a run costs at most epsilon."""
    start = time.perf_counter()
    described = mechanism.of_options(
        unit, rate, steps, group_size, adjacency, accountant, cap, users, noise, participations
    )
    noise_multiplier = described.calibrate(epsilon, delta)
    payload, text = mechanism.told(
        described, noise_multiplier=noise_multiplier, delta=delta, words=described.in_words()
    )
    common.emit(
        json,
        {
            "noise_multiplier": noise_multiplier,
            **payload,
            "seconds": time.perf_counter() - start,
        },
        f"noise_multiplier={mechanism.noise_up(noise_multiplier)}\n{text}",
    )
