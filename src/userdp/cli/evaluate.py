"""`userdp evaluate`: held-out loss of a run's model, or of any model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from userdp.cli import common
from userdp.data.store import UserStore
from userdp.errors import InputError
from userdp.history import read_history
from userdp.run_facts import has_facts
from userdp.run_files import read_run, run_of, shared_users

DEFAULT_LENGTH = 128


def evaluate(
    model: Annotated[str, typer.Argument(help="A run's directory, or a model's path or name.")],
    store: Annotated[Path, typer.Argument(help="User store to measure on: other users.")],
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens a row; by default what the run trained with, or 128.")
    ] = None,
    allow_overlap: Annotated[
        bool,
        typer.Option(
            "--allow-overlap",
            help="Measure on training users, or where that cannot be known: no guarantee covers "
            "such a number.",
        ),
    ] = False,
    unfinished: common.Unfinished = False,
    json: common.Json = False,
) -> None:
    """Measure loss, perplexity and next-token accuracy on a store, over all tokens and by user."""
    if sequence_length is not None and sequence_length < 2:
        raise InputError(
            f"--sequence-length {sequence_length}: predicting takes at least 2 tokens. Give 2 or "
            "more, or leave the option out."
        )
    held_out = UserStore.open(store)
    run = run_of(Path(model))
    record = None
    if run is not None:
        record = read_run(run, unfinished=unfinished)
        for problem in record.problems:
            common.say(f"unfinished: {problem}")
    if not allow_overlap:
        _refuse_training_users(Path(model), run, held_out)
    common.quiet_transformers()
    from userdp import evaluation, saved_run
    from userdp.clipping.execute.models import most_positions
    from userdp.models.load import load_model
    from userdp.probe import check_positions

    if run is not None and has_facts(run):
        loaded, tokenizer, facts = saved_run.load_run(run)
        length = facts.sequence_length
    else:
        loaded, tokenizer = load_model(model if run is None else run / "model")
        # Nobody asked for this length, so it gives way to the model's.
        length = min(DEFAULT_LENGTH, most_positions(loaded) or DEFAULT_LENGTH)
    base_checked = None
    if run is not None and record is not None and (run / "model/adapter_config.json").is_file():
        base_checked = saved_run.check_base(run, record.ledger, loaded, unfinished=unfinished)
        if base_checked is None:
            common.say("note: the ledger does not name the base model, so it was not compared.")
        elif not base_checked:
            common.say(f"unfinished: {saved_run.OTHER_BASE}")
    if sequence_length is not None:
        length = sequence_length
    check_positions(loaded, length)
    result = evaluation.evaluate_store(loaded, tokenizer, held_out, sequence_length=length)
    common.emit(
        json,
        {
            **result.to_json(),
            "overlap_checked": not allow_overlap,
            "unfinished": record is not None and (bool(record.problems) or base_checked is False),
            "base_checked": base_checked,
        },
        f"loss {result.loss:.4f}, perplexity {result.perplexity:.2f}, "
        f"next token right {result.accuracy_top1:.1%}\n"
        f"over {result.tokens:,} tokens of {result.users:,} users\n"
        f"by user: mean {result.mean_user_loss:.4f}, worst tenth {result.worst_decile_loss:.4f}, "
        + ", ".join(
            f"{float(level):.0%} {value:.4f}" for level, value in result.user_loss_quantiles.items()
        )
        + "\nthese users' numbers are not covered by any privacy statement.",
    )


def _refuse_training_users(model: Path, run: Path | None, held_out: UserStore) -> None:
    """Raise if users of the store were trained on, or if that cannot be known."""
    if run is not None:
        shared = shared_users(run, held_out)
    elif model.is_dir() and read_history(model) is not None:
        shared = None
    else:
        # No run of ours made this model, so there are no training users.
        return
    if shared is None:
        raise InputError(
            f"{model}: {common.UNCHECKED_OVERLAP} Or say --allow-overlap: a loss on training users "
            "is covered by no guarantee."
        )
    common.refuse_overlap(shared, held_out, way_out="Evaluate on others, or say --allow-overlap.")
