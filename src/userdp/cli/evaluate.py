"""`userdp evaluate`: held-out loss of a run's model, or of any model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from userdp.cli import common
from userdp.data.store import UserStore


def evaluate(
    model: Annotated[str, typer.Argument(help="A run's directory, or a model's path or name.")],
    store: Annotated[Path, typer.Argument(help="User store to measure on: other users.")],
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens a row; by default what the run trained with, or 128.")
    ] = None,
    allow_overlap: Annotated[
        bool, typer.Option("--allow-overlap", help="Measure on training users all the same.")
    ] = False,
    json: common.Json = False,
) -> None:
    """Measure loss, perplexity and next-token accuracy on a store."""
    held_out = UserStore.open(store)
    common.quiet_transformers()
    from userdp import evaluation, runs
    from userdp.data.tokens import tokenise
    from userdp.models.load import load_model

    if (Path(model) / "ledger.jsonl").is_file():
        loaded, tokenizer, config = runs.load_run(Path(model))
        sequence_length = sequence_length or config.data.sequence_length
        if not allow_overlap and (config.data.store / "manifest.json").is_file():
            common.refuse_overlap(UserStore.open(config.data.store), held_out)
    else:
        loaded, tokenizer = load_model(model)
    rows = tokenise(held_out, tokenizer, sequence_length=sequence_length or 128)
    result = evaluation.evaluate(loaded, rows, pad_token=tokenizer.pad_token_id)
    common.emit(
        json,
        {
            "loss": result.loss,
            "perplexity": result.perplexity,
            "accuracy_top1": result.accuracy_top1,
            "tokens": result.tokens,
            "users": result.users,
        },
        f"loss {result.loss:.4f}, perplexity {result.perplexity:.2f}, "
        f"next token right {result.accuracy_top1:.1%}\n"
        f"over {result.tokens:,} tokens of {result.users:,} users\n"
        "these users' numbers are not covered by any privacy statement.",
    )
