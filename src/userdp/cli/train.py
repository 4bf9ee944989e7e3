"""`userdp train`: a private run from a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from userdp.cli import common
from userdp.config import load_config


def train(
    config: Annotated[Path, typer.Argument(help="A TOML file; see docs/configuration.md.")],
    out: Annotated[Path, typer.Option(help="Directory of the run to write.")],
    json: common.Json = False,
) -> None:
    """Train a model with user-level privacy and leave it with its ledger and statement."""
    settings = load_config(config)
    plan = settings.plan()
    paid = settings.load_paid()
    plan.check_paid(paid)
    for caution in plan.cautions():
        common.say(f"caution: {caution}")

    # torch only from here on: a wrong configuration is refused at once.
    common.quiet_transformers()
    from userdp import evaluation, runs
    from userdp.data.store import UserStore
    from userdp.data.tokens import tokenise

    held_out = None
    if settings.data.evaluation is not None:
        held_out = UserStore.open(settings.data.evaluation)
        common.refuse_overlap(UserStore.open(settings.data.store), held_out)
    if settings.training.on_cuda and settings.training.clipping == "fast":
        common.say("the first steps compile the model for its batches: a minute or two")
    with common.training_progress(plan, paid=paid) as on_step:
        run = runs.train_from_config(config, settings, plan, out, on_step=on_step)
    loss = None
    if held_out is not None:
        model, tokenizer, _ = runs.load_run(out)
        rows = tokenise(held_out, tokenizer, sequence_length=settings.data.sequence_length)
        loss = evaluation.evaluate(model, rows, pad_token=tokenizer.pad_token_id).loss
    statement = run.statement
    common.emit(
        json,
        {
            "steps": statement.steps,
            "epsilon": statement.epsilon if statement.is_private else None,
            "delta": statement.delta,
            "loss": loss,
            "run": str(out),
        },
        f"{statement}\n"
        + (f"held-out loss {loss:.4f}\n" if loss is not None else "")
        + f"run: {out}",
    )
