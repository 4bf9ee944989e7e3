"""`userdp export`: writes what may be published of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from userdp.cli import common
from userdp.runs import export as exporting


def export(
    run: common.Run,
    out: Annotated[Path, typer.Option(help="New directory for what may be published.")],
    base: Annotated[
        str, typer.Option(help="The base model's name on the hub, for others to load it.")
    ] = "",
    merged: Annotated[
        bool,
        typer.Option("--merged", help="Whole weights: the adapter merged into its base."),
    ] = False,
    license: Annotated[str, typer.Option(help="The licence's id, such as apache-2.0.")] = "",
    json: common.Json = False,
) -> None:
    """Write the model with its card, statement and ledger, and nothing else."""
    if merged:
        # Merging needs torch, which takes seconds to load.
        from userdp.runs.merging import export_merged

        done = export_merged(run, out, base=base, license=license)
    else:
        done = exporting.export(run, out, base=base, license=license)
    common.emit(
        json,
        {
            "files": sorted(done.origins),
            "origins": done.origins,
            **common.promised(done.statement),
        },
        "\n".join(f"{out / name}: {origin}" for name, origin in sorted(done.origins.items()))
        + f"\n{done.statement.sentence}",
    )
