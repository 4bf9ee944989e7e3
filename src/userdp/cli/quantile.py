"""`userdp quantile`: a quantile over users, for a price that the run's ledger is charged."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from dp_accounting import dp_event

from userdp.accounting import accountant
from userdp.accounting.quantile import private_quantile
from userdp.budget.population import Population
from userdp.cli import common
from userdp.data.store import UserStore
from userdp.errors import InputError
from userdp.prices.paid import Paid, write_paid
from userdp.statement import epsilon_text
from userdp.streams import RunSecret
from userdp.units import Adjacency


class Of(StrEnum):
    """The number that each user has."""

    RECORDS_PER_USER = "records-per-user"


def quantile(
    store: Annotated[Path, typer.Argument(help="Directory of a user store.")],
    epsilon: Annotated[float, typer.Option(help="What this look may cost alone, at --delta.")],
    of: Annotated[Of, typer.Option(help="The number of each user.")] = Of.RECORDS_PER_USER,
    quantile: Annotated[float, typer.Option(help="Share of users below; 0.5: the median.")] = 0.5,
    delta: Annotated[
        float, typer.Option(help="Delta of --epsilon; the run prices the look at its own.")
    ] = 1e-6,
    largest: Annotated[
        int, typer.Option(help="Largest answer, chosen without the data; steps of 1, 1.5, 2, ...")
    ] = 1024,
    adjacency: common.AdjacencyOption = Adjacency.ADD_REMOVE,
    out: Annotated[
        Path | None, typer.Option(help="Write the price here, for \\[privacy] paid of a run.")
    ] = None,
    json: common.Json = False,
) -> None:
    """Say a quantile over the users privately, and what it cost: nothing peeks for free."""
    if out is not None and out.exists():
        raise InputError(f"{out} is there already: name another file, each look is paid for.")
    if out is not None and not out.absolute().parent.is_dir():
        # Said before the look, which would be paid for and never seen.
        raise InputError(f"{out}: there is no directory of that name to write to.")
    if not 0 < quantile < 1:
        raise InputError(f"--quantile {quantile} must lie strictly between 0 and 1.")
    thresholds = answers(largest)
    opened = UserStore.open(store)
    refuse_several_owners(opened)
    noise_multiplier = accountant.calibrate(
        dp_event.GaussianDpEvent, target=epsilon, delta=delta, adjacency=adjacency
    )
    paid = Paid(
        what=f"{of.value.replace('-', ' ')}, private {quantile:g} quantile",
        event=dp_event.GaussianDpEvent(noise_multiplier),
    )
    # Counted before the look, so that a look that fails is paid for and none is free.
    entry = Population.of(opened).debit(paid.what, paid.event, adjacency)
    found = private_quantile(
        opened.records_per_user().astype(np.float64),
        thresholds=thresholds,
        quantile=quantile,
        noise_multiplier=noise_multiplier,
        # A new secret each time, so that two looks never share their noise.
        rng=RunSecret.from_system().streams("quantile").rng(0),
    )
    assert found.event == paid.event, "what was counted is what it cost"
    told = accountant.evaluate(found.event, delta=delta, adjacency=adjacency)
    if out is not None:
        # Charged before the value is shown, so that no answer is ever known without being paid for.
        write_paid(out, dataclasses.replace(paid, entry=entry), value=found.value)
        common.say(f"wrote {out}: name it under [privacy] paid")
    common.emit(
        json,
        {
            "of": of.value,
            "quantile": quantile,
            "value": int(found.value),
            "epsilon": told.epsilon,
            "delta": delta,
            "adjacency": adjacency.value,
            "certified_by": told.certified_by,
            "cautions": list(opened.cautions),
            "entry": entry,
            **paid.to_json(),
        },
        f"{paid.what}: at most {found.value:g}\n"
        f"cost alone: (epsilon={epsilon_text(told.epsilon)}, delta={delta:g}), user-level, "
        f"{adjacency.value}; noise_multiplier={noise_multiplier:.5g}\n"
        f"certified by {told.certified_by}"
        + "".join(f"\ncaution: {caution}" for caution in opened.cautions)
        + ("" if out else "\nwith --out FILE a run's statement can include it")
        + f"\ncounted in the budget of these people: `userdp budget {store}`",
    )


def refuse_several_owners(store: UserStore) -> None:
    """Raise if some record has several owners.

    The price assumes a histogram in which one user moves one entry. A user who shares records with
    everybody moves everybody's entry.
    """
    shared = int((store.users_per_record() > 1).sum())
    if shared:
        raise InputError(
            f"{store.path}: {shared:,} of {store.num_records:,} records have several owners, so "
            "one user's absence changes the counts of others, and no price of one user's change "
            "covers that. Under a fixed-graph adjacency who owns which record is public, and "
            "`userdp stats` says the quantiles for nothing. Otherwise import with --owners first, "
            "if one owner is the whole truth."
        )


def answers(largest: int) -> list[float]:
    """The possible answers: 1, 2, 3, 4, 6, 8, 12, ... up to `largest`, which is always one.

    They are few, because every bin of the histogram gets its own noise.

    >>> answers(10)
    [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0]
    """
    if largest < 1:
        raise InputError(f"--largest {largest}: a user has at least one record.")
    powers = [1 << power for power in range(largest.bit_length())]
    halves = [3 * power // 2 for power in powers[1:]]
    return sorted(float(value) for value in {*powers, *halves, largest} if value <= largest)
