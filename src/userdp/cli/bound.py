"""`userdp bound`: a selection of records to which no user contributes more than a bound."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from userdp.bounding.names import Method, Weight, Where
from userdp.cli import common
from userdp.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from userdp.data.store import UserStore


def bound(
    source: Annotated[
        Path, typer.Argument(help="A store, or an .npz with indptr, indices and n_users.")
    ],
    max_records_per_user: Annotated[
        int | None,
        typer.Option(
            help="The most selected records any user may own; optional for min-separation."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the selection to this .npz.")] = None,
    method: Annotated[Method, typer.Option(help="How records are chosen.")] = Method.GREEDY,
    engine: Annotated[
        Where, typer.Option(help="With greedy: in memory, or in parallel rounds on an engine.")
    ] = Where.LOCAL,
    finish_below: Annotated[
        int | None,
        typer.Option(
            help="With an engine: undecided incidences to finish in memory, not in rounds."
        ),
    ] = None,
    weight: Annotated[
        Weight, typer.Option(help="With greedy or exact: what a record is worth.")
    ] = Weight.EQUAL,
    time_limit: Annotated[
        float, typer.Option(help="With exact methods: seconds before the best found is returned.")
    ] = 60.0,
    few_owners: Annotated[
        int, typer.Option(help="With balanced: a record of at most this many owners has few (u).")
    ] = 1,
    few_run: Annotated[
        int, typer.Option(help="With balanced: records of few owners visited in a row (c1).")
    ] = 1,
    many_run: Annotated[
        int, typer.Option(help="With balanced: records of many owners visited in a row (c2).")
    ] = 1,
    grid: Annotated[
        bool, typer.Option("--grid", help="With balanced: also the Pareto front of 80 settings.")
    ] = False,
    steps: Annotated[int | None, typer.Option(help="With min-separation: batches (T).")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="With min-separation: records a batch (B).")
    ] = None,
    separation: Annotated[
        int | None,
        typer.Option(help="With min-separation: b; left out, the largest that is found."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="With perplexity methods: a public model's path or name, not of these users."
        ),
    ] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(min=2, help="With perplexity methods: that of the training; by default 128."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="With random methods: fixes the draw, which is no secret."),
    ] = None,
    json: common.Json = False,
) -> None:
    """Choose records so that no user owns more than K of them.

    From the owners alone; longest, shortest and the perplexity methods read the texts of a store
    whose records have one owner each.
    """
    # Imported here, so that other commands need not wait for the compiler to load.
    from userdp.bounding.bound import bound as bound_contributions

    if out is not None and out.exists():
        _replace_a_selection_only(out)
    bounded = bound_contributions(
        source,
        max_records_per_user,
        method=method,
        engine=engine,
        finish_below=finish_below,
        weight=weight,
        time_limit=time_limit,
        few_owners=few_owners,
        few_run=few_run,
        many_run=many_run,
        grid=grid,
        steps=steps,
        batch_size=batch_size,
        separation=separation,
        losses=None if model is None else partial(_losses, model, sequence_length),
        seed=seed,
    )
    if out is not None:
        bounded.selection.save(out)
    common.emit(json, bounded.to_json() | {"out": str(out) if out else None}, str(bounded))


def _replace_a_selection_only(out: Path) -> None:
    """Say that an earlier selection is replaced; it can be made again. Anything else is refused."""
    from userdp.bounding.selection import Selection

    try:
        Selection.load(out)
    except (InputError, OSError) as error:
        raise InputError(f"{out} is there already, and no selection: name another file.") from error
    common.say(f"note: {out} holds an earlier selection, which is replaced.")


def _losses(model: str, sequence_length: int | None, store: UserStore) -> NDArray[np.float64]:
    """The mean loss of each record under a model: the logarithm of its perplexity."""
    common.quiet_transformers()
    from userdp.evaluation import record_losses
    from userdp.models.load import load_model

    scorer, tokenizer = load_model(model)
    return record_losses(scorer, tokenizer, store, sequence_length=sequence_length)
