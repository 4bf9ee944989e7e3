"""`userdp personalize`: what each test user gains by a model of their own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from userdp.cli import common
from userdp.cli.evaluate import SequenceLength
from userdp.cli.measured import about_loss, open_measured
from userdp.errors import InputError


def personalize(
    run: common.Model,
    store: Annotated[Path, typer.Argument(help="User store of test users: others than trained.")],
    learning_rate: Annotated[float, typer.Option(help="Of SGD. Tune it on yet other users.")] = 0.1,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over half of a user's records.")] = 4,
    batch_rows: Annotated[int, typer.Option(min=1, help="Rows of a user in one step.")] = 8,
    users_at_once: Annotated[
        int, typer.Option(min=1, help="Users in one pass, where adapters are tuned; for memory.")
    ] = 32,
    lora_rank: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="For a model without adapters: tune new ones of this rank, many users at once, "
            "instead of all weights, one user after the other.",
        ),
    ] = None,
    sequence_length: SequenceLength = None,
    device: common.Device = "cpu",
    unfinished: common.Unfinished = False,
    json: common.Json = False,
) -> None:
    """Tune a copy of the model on half of each user's records, and measure it on the other half."""
    if not 0 < learning_rate < math.inf:
        raise InputError(f"--learning-rate {learning_rate}: give a positive number.")
    found = open_measured(
        run,
        store,
        sequence_length=sequence_length,
        unfinished=unfinished,
        device=device,
    )
    from userdp.models.adapters import Lora, add_lora
    from userdp.personalization import personalize

    model = found.model
    if hasattr(model, "peft_config"):
        if lora_rank is not None:
            raise InputError("--lora-rank: the model has adapters already; leave the option out.")
        # A loaded adapter is frozen.
        model.set_adapter(model.active_adapter)
    elif lora_rank is not None:
        model = add_lora(model, Lora(rank=lora_rank))
    result = personalize(
        model,
        found.tokenizer,
        found.store,
        task=found.task,
        sequence_length=found.sequence_length,
        learning_rate=learning_rate,
        epochs=epochs,
        batch_rows=batch_rows,
        users_at_once=users_at_once,
    )
    told = result.to_json()
    common.emit(
        json,
        {
            **told,
            "unfinished": found.unfinished,
            "base_checked": found.base_checked,
            "own_loss": found.own_loss or None,
            "covered_by_statement": False,
        },
        f"loss {result.loss_before:.4f} before, {result.loss_after:.4f} after {epochs} epochs on "
        f"half of each user's records: the mean over {told['users']:,} users\n"
        f"{told['share_improved']:.0%} of them gain; tuned: {told['tuned']}\n"
        + (
            f"{told['users_left_out']:,} users are left out: they have no two records with "
            "something to predict, or nothing in the second half\n"
            if told["users_left_out"]
            else ""
        )
        + f"{about_loss(found)}these users' numbers are not covered by any privacy statement.",
    )
