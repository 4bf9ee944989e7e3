"""`userdp train`: a private run from a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from userdp.cli import common
from userdp.config import Config, load_config
from userdp.data.store import UserStore
from userdp.history import read_history
from userdp.run_files import Overlap, overlap, shared_users

OTHER_USERS = "Name a store of other users as [data] evaluation, or leave that setting out."


def train(
    config: Annotated[Path, typer.Argument(help="A TOML file; see docs/configuration.md.")],
    out: Annotated[Path, typer.Option(help="Directory of the run to write.")],
    json: common.Json = False,
) -> None:
    """Train a model with user-level privacy and leave it with its ledger and statement."""
    settings = load_config(config)
    plan = settings.plan()
    paid = settings.load_paid()
    earlier = settings.load_earlier()
    plan.check_paid(paid, earlier=earlier)
    if earlier:
        counted = (
            "other_people declares that nobody here was in them, and the largest epsilon is stated"
            if settings.privacy.other_people
            else "their cost is composed with this one's"
        )
        common.say(
            f"note: the model carries {sum(item.steps for item in earlier):,} steps of "
            f"{len(earlier)} earlier private runs; {counted}"
        )
    for caution in plan.cautions():
        common.say(f"caution: {caution}")

    # Import torch only now, so that a wrong configuration is refused at once.
    common.quiet_transformers()
    from userdp import evaluation, saved_run, training
    from userdp.data.tokens import tokenise

    held_out, unchecked = None, False
    if settings.data.evaluation is not None:
        held_out = UserStore.open(settings.data.evaluation)
        shared = UserStore.open(settings.data.store).shares_users_with(held_out)
        common.refuse_overlap(shared, held_out, way_out=OTHER_USERS)
        before = _in_earlier_runs(settings, held_out)
        common.refuse_overlap(before.shared, held_out, way_out=OTHER_USERS)
        unchecked = shared is None or not before.is_known
        if unchecked:
            common.say(f"note: {common.UNCHECKED_OVERLAP}")
    if settings.training.on_cuda and settings.training.path == "fast":
        common.say("the first steps compile the model for its batches: a minute or two")
    with common.training_progress(plan, paid=paid, earlier=earlier) as on_step:
        run = training.train_from_config(config, settings, plan, out, on_step=on_step)
    loss = None
    if held_out is not None:
        # Check again with the finished run's own lists, which name every run behind the model.
        shared = shared_users(out, held_out)
        common.refuse_overlap(shared, held_out, way_out=OTHER_USERS)
        unchecked = shared is None
        model, tokenizer, _ = saved_run.load_run(out)
        rows = tokenise(held_out, tokenizer, sequence_length=settings.data.sequence_length)
        loss = evaluation.evaluate(model, rows, pad_token=tokenizer.pad_token_id).loss
    statement = run.statement
    common.emit(
        json,
        {
            **common.promised(statement),
            "steps": statement.steps,
            "earlier": list(statement.earlier),
            "overlap_checked": None if held_out is None else not unchecked,
            "loss": loss,
            "run": str(out),
        },
        f"{statement}\n"
        + (f"held-out loss {loss:.4f}\n" if loss is not None else "")
        + f"run: {out}",
    )


def _in_earlier_runs(settings: Config, held_out: UserStore) -> Overlap:
    """How many of these users were trained on in the runs behind the model."""
    past = read_history(Path(settings.model.path))
    if past is None:
        return Overlap(shared=0, is_known=True)
    return overlap(held_out, {entry["run"]: 1 for entry in past.entries}, past.homes)
