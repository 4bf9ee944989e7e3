"""`userdp evaluate`: held-out loss of a run's model, or of any model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from userdp.cli import common
from userdp.cli.measured import about_loss, open_measured
from userdp.names.tasks import TaskName, predicted

AllowOverlap = Annotated[
    bool,
    typer.Option(
        "--allow-overlap",
        help="Measure on training users, or where that cannot be known: no guarantee covers "
        "such a number.",
    ),
]
SequenceLength = Annotated[
    int | None, typer.Option(help="Tokens a row; by default what the run trained with, or 128.")
]


def evaluate(
    model: common.Model,
    store: Annotated[Path, typer.Argument(help="User store to measure on: other users.")],
    sequence_length: SequenceLength = None,
    task: Annotated[
        TaskName | None,
        typer.Option(
            help="What is predicted; by default as the run was trained, else every token, of chats "
            "the assistant's."
        ),
    ] = None,
    device: common.Device = "cpu",
    allow_overlap: AllowOverlap = False,
    unfinished: common.Unfinished = False,
    json: common.Json = False,
) -> None:
    """Measure loss, perplexity and accuracy on a store, over everything predicted and by user."""
    found = open_measured(
        model,
        store,
        sequence_length=sequence_length,
        task=task,
        allow_overlap=allow_overlap,
        has_allow_overlap=True,
        unfinished=unfinished,
        device=device,
    )
    from userdp import evaluation

    result = evaluation.evaluate_store(
        found.model,
        found.tokenizer,
        found.store,
        sequence_length=found.sequence_length,
        task=found.task,
    )
    told = predicted(found.task.name)
    common.emit(
        json,
        {
            **result.to_json(),
            "overlap_checked": found.overlap_checked,
            "unfinished": found.unfinished,
            "base_checked": found.base_checked,
            "own_loss": found.own_loss or None,
            "covered_by_statement": False,
        },
        f"loss {result.loss:.4f}, "
        + (f"perplexity {result.perplexity:.2f}, " if told.has_perplexity else "")
        + f"{told.right} {result.accuracy_top1:.1%}\n"
        f"over {result.tokens:,} {told.unit}s of {result.users:,} users\n"
        f"by user: mean {result.mean_user_loss:.4f}, worst tenth {result.worst_decile_loss:.4f}, "
        + ", ".join(
            f"{float(level):.0%} {value:.4f}" for level, value in result.user_loss_quantiles.items()
        )
        + f"\n{about_loss(found)}these users' numbers are not covered by any privacy statement.",
    )
