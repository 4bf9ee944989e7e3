"""`userdp account`: epsilon of numbers, or of a run by its ledger."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from userdp.accounting import renyi
from userdp.accounting import steps as steps_of
from userdp.accounting.certificate import Evaluation
from userdp.cli import common, mechanism, sampled
from userdp.cli.mechanism import AccountantName
from userdp.cli.sampled import NoiseKind
from userdp.errors import InputError
from userdp.ledger.book import Ledger
from userdp.runs.files import read_run
from userdp.statement import round_up
from userdp.units import Adjacency, SamplingUnit


def account(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="Directory of a run, or a trainer's output_dir: read its ledger.",
            callback=common.run_found,
        ),
    ] = None,
    unit: common.Unit = SamplingUnit.USER,
    rate: sampled.Rate = None,
    steps: sampled.Steps = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise standard deviation over clip norm.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Delta; below 1/N.")] = None,
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
    unfinished: common.Unfinished = False,
    json: common.Json = False,
) -> None:
    """Say what a run costs: epsilon at delta, for one user's whole data."""
    if run is not None:
        if any(value is not None for value in (rate, steps, noise_multiplier, delta)):
            raise InputError("give either a run's directory or numbers, not both.")
        _account_run(run, json, unfinished=unfinished, by=accountant)
        return
    if noise_multiplier is None or delta is None:
        raise InputError(
            "give --rate, --steps, --noise-multiplier and --delta, or a run's directory."
        )
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
    if noise_multiplier == 0:
        raise InputError("--noise-multiplier 0 protects nobody: epsilon is infinite.")
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
        raise InputError(f"--noise-multiplier {noise_multiplier} is not a positive finite number.")
    payload, text = mechanism.told(
        described,
        noise_multiplier=noise_multiplier,
        delta=delta,
        words=f"{described.drawing.in_words()}, noise_multiplier={noise_multiplier:g}",
    )
    common.emit(json, payload, text)


def _account_run(run: Path, as_json: bool, *, unfinished: bool, by: AccountantName) -> None:
    recorded = read_run(run, unfinished=unfinished)
    statement = recorded.statement()
    payload = {
        **common.promised(statement),
        "adjacency": statement.adjacency,
        "unit": statement.sampling,
        "protects": statement.unit,
        "steps": statement.steps,
        "paid": list(statement.paid),
        "earlier": list(statement.earlier),
        "accountant": by.value,
        "certified_by": statement.certified_by,
    }
    words = str(statement)
    if by is not AccountantName.PLD:
        found = _of_steps(recorded.ledger, by)
        payload |= {
            "epsilon_pld": payload["planned_epsilon"],
            "epsilon": None if statement.mark else found.epsilon,
            "planned_epsilon": found.epsilon,
            "certified_by": found.certified_by,
        }
        words += f"\nby {found.certified_by}: epsilon={round_up(found.epsilon):g}, for comparison"
    common.emit(as_json, payload, words)


def _of_steps(ledger: Ledger, by: AccountantName) -> Evaluation:
    """Epsilon of a run's steps by a looser accountant, as papers state it."""
    plan = ledger.plan
    if by is AccountantName.GROUP_PRIVACY or ledger.paid or ledger.earlier or not plan.has_price:
        raise InputError(
            f"--accountant {by.value} with a run: only the steps of a private run have such a "
            "price, by rdp or moments, without paid looks and earlier runs. Leave it out."
        )
    rule = renyi.evaluation if by is AccountantName.RDP else renyi.moments_evaluation
    event = plan.event()
    if steps_of.has_no_privacy(event):
        # dp_accounting leaves out the orders that overflow, and says 0 if none is left.
        raise InputError(
            f"--accountant {by.value} with noise_multiplier={plan.noise.noise_multiplier:g}: with "
            "so little noise no finite epsilon holds."
        )
    return rule(event, delta=plan.delta, adjacency=plan.adjacency)
