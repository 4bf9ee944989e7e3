"""`userdp account`: epsilon of numbers, or of a run by its ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from userdp.accounting import accountant, events
from userdp.cli import common
from userdp.errors import InputError
from userdp.ledger import Ledger
from userdp.noise.gaussian import Gaussian
from userdp.plan import step_event
from userdp.statement import round_up
from userdp.units import Adjacency, SamplingUnit


def account(
    run: Annotated[Path | None, typer.Argument(help="Directory of a run: read its ledger.")] = None,
    unit: common.Unit = SamplingUnit.USER,
    rate: Annotated[float | None, typer.Option(help="Sampling probability q or p.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of training steps.")] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise standard deviation over clip norm.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Delta; below 1/N.")] = None,
    group_size: common.GroupSize = 1,
    adjacency: common.AdjacencyOption = Adjacency.ADD_REMOVE,
    json: common.Json = False,
) -> None:
    """Say what a run costs: epsilon at delta, for one user's whole data."""
    if run is not None:
        if any(value is not None for value in (rate, steps, noise_multiplier, delta)):
            raise InputError("give either a run's directory or numbers, not both.")
        _account_run(run, json)
        return
    if rate is None or steps is None or noise_multiplier is None or delta is None:
        raise InputError(
            "give --rate, --steps, --noise-multiplier and --delta, or a run's directory."
        )
    common.check_steps(steps)
    if noise_multiplier == 0:
        raise InputError("--noise-multiplier 0 protects nobody: epsilon is infinite.")
    sampler = common.sampler_of(unit, rate, group_size)
    event = events.repeated(step_event(sampler, Gaussian(noise_multiplier=noise_multiplier)), steps)
    epsilon = accountant.epsilon(event, delta=delta, adjacency=adjacency)
    common.emit(
        json,
        {
            "epsilon": epsilon,
            "delta": delta,
            "adjacency": adjacency.value,
            "unit": unit.value,
            "protects": "user",
            "accountant": "pld",
            "certified_by": accountant.certified_by(),
        },
        f"(epsilon={round_up(epsilon):g}, delta={delta:g}), user-level, {adjacency.value}\n"
        f"{steps:,} steps, Poisson sampling of {unit.value}s at rate {rate:g}, "
        f"noise_multiplier={noise_multiplier:g}"
        + (f", at most {group_size} records a user" if unit is SamplingUnit.RECORD else "")
        + f"\ncertified by {accountant.certified_by()}",
    )


def _account_run(run: Path, as_json: bool) -> None:
    ledger = Ledger.read(run / "ledger.jsonl")
    statement = ledger.statement()
    unit = SamplingUnit.USER if "users" in statement.sampler else SamplingUnit.RECORD
    common.emit(
        as_json,
        {
            "epsilon": statement.epsilon if statement.is_private else None,
            "delta": statement.delta,
            "adjacency": statement.adjacency,
            "unit": unit.value,
            "protects": "user",
            "steps": statement.steps,
            "accountant": "pld",
            "certified_by": statement.certified_by,
        },
        str(statement),
    )
