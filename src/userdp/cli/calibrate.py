"""`userdp calibrate`: the least noise that meets a target epsilon."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from userdp.cli import common, mechanism, sampled
from userdp.cli.mechanism import AccountantName
from userdp.cli.sampled import NoiseKind
from userdp.units import Adjacency, SamplingUnit


def calibrate(
    epsilon: Annotated[float, typer.Option(help="Target epsilon; the result is at most this.")],
    delta: common.Delta,
    rate: sampled.Rate = None,
    steps: sampled.Steps = None,
    unit: common.Unit = SamplingUnit.USER,
    group_size: common.GroupSize = 1,
    adjacency: common.AdjacencyOption = Adjacency.ADD_REMOVE,
    cap: sampled.Cap = None,
    users: sampled.Users = None,
    accountant: mechanism.Accountant = AccountantName.PLD,
    noise: sampled.NoiseOption = NoiseKind.GAUSSIAN,
    sampler: sampled.SamplerOption = None,
    participations: sampled.Participations = None,
    parts: sampled.Parts = None,
    bands: sampled.Bands = None,
    json: common.Json = False,
) -> None:
    """Find the least noise multiplier at which a run costs at most epsilon."""
    start = time.perf_counter()
    described = mechanism.Mechanism(
        drawing=sampled.Drawing(
            sampler=sampler,
            unit=unit,
            rate=rate,
            steps=steps,
            group_size=group_size,
            cap=cap,
            num_users=users,
            noise=noise,
            participations=participations,
            parts=parts,
            bands=bands,
        ),
        adjacency=adjacency,
        accountant=accountant,
    )
    noise_multiplier = described.calibrate(epsilon, delta)
    payload, text = mechanism.told(
        described,
        noise_multiplier=noise_multiplier,
        delta=delta,
        words=described.drawing.in_words(),
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
