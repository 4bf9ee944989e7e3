"""`userdp duplicates`: near-duplicate records in a store, or shared with a public corpus."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from userdp.cli import common
from userdp.data import duplicates as near
from userdp.data.engine import EngineName
from userdp.data.importers import jsonl
from userdp.data.split import write_subset
from userdp.data.store import UserStore
from userdp.errors import InputError


def duplicates(
    store: Annotated[Path, typer.Argument(help="Directory of a user store.")],
    against: Annotated[
        Path | None, typer.Option(help="Public corpus: JSON Lines, owners not needed.")
    ] = None,
    text: Annotated[str, typer.Option(help="Text column of the public corpus.")] = "text",
    threshold: Annotated[
        float, typer.Option(help="Share of common word 5-grams from which texts count as equal.")
    ] = near.THRESHOLD,
    out: Annotated[
        Path | None, typer.Option(help="Write a store without them; the first copy stays.")
    ] = None,
    engine: Annotated[EngineName, typer.Option(help="What joins the buckets.")] = EngineName.DUCKDB,
    json: common.Json = False,
) -> None:
    """Count texts that several records share, and remove them on request."""
    if not 0.0 < threshold <= 1.0:
        raise InputError(f"--threshold {threshold}: give a share above 0 and at most 1.")
    if out is not None and out.exists():
        raise InputError(f"{out} exists: choose another output directory.")
    opened = UserStore.open(store)
    with tempfile.TemporaryDirectory(prefix="userdp-") as scratch:
        if against is None:
            clusters = near.within(opened, Path(scratch), threshold=threshold, engine=engine)
            users = clusters.users_per_cluster(opened)
            removed = clusters.copies
            result: dict[str, Any] = {
                "records": opened.num_records,
                "clusters": clusters.num_clusters,
                "copies": len(removed),
                "clusters_of_several_users": int((users > 1).sum()),
                "most_users_of_a_cluster": int(users.max(initial=0)),
            }
            words = (
                f"{len(removed):,} of {opened.num_records:,} records are near-duplicates of an "
                f"earlier one, in {clusters.num_clusters:,} clusters\n"
                f"{int((users > 1).sum()):,} clusters are shared by several users, by up to "
                f"{int(users.max(initial=0)):,}"
            )
        else:
            public = list(jsonl.texts(against, text))
            shared, removed = near.between(
                public, opened, Path(scratch), threshold=threshold, engine=engine
            )
            result = {
                "records": opened.num_records,
                "public": len(public),
                "public_in_store": len(shared),
                "copies": len(removed),
            }
            words = (
                f"{len(shared):,} of {len(public):,} public texts are near-duplicates of "
                f"{len(removed):,} of {opened.num_records:,} private records"
            )
    if out is not None:
        kept = np.setdiff1d(np.arange(opened.num_records), removed)
        result["kept"] = write_subset(opened, kept, out).records
        words += f"\nwithout them: {result['kept']:,} records in {out}"
    common.emit(json, result, words)
