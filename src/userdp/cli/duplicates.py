"""`userdp duplicates`: near-duplicates inside a user's records, or of a public corpus."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

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
    across_users: Annotated[
        bool,
        typer.Option(
            "--across-users",
            help="Compare different users' records too. Removing them is not private: every "
            "statement of a run on the new store will say so.",
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write a store without them; the first copy stays.")
    ] = None,
    engine: Annotated[EngineName, typer.Option(help="What joins the buckets.")] = EngineName.DUCKDB,
    json: common.Json = False,
) -> None:
    """Count near-duplicates inside each user's records, and remove them on request."""
    if not 0.0 < threshold <= 1.0:
        raise InputError(f"--threshold {threshold}: give a share above 0 and at most 1.")
    if out is not None and out.exists():
        raise InputError(f"{out} exists: choose another output directory.")
    opened = UserStore.open(store)
    shared = int((opened.users_per_record() > 1).sum())
    if out is not None and shared and not across_users:
        raise InputError(
            f"{opened.path}: {shared:,} of {opened.num_records:,} records have several owners. "
            "Removing records by their text would let one owner's text decide who owns how much, "
            "and a guarantee with fixed owners would not hold. Leave them in, or say "
            "--across-users: every statement of a run on the new store will carry a caution."
        )
    with tempfile.TemporaryDirectory(prefix="userdp-") as scratch:
        if against is not None:
            found = _against(opened, against, text, Path(scratch), threshold, engine)
        else:
            compare = near.across_users if across_users else near.inside_users
            clusters = compare(opened, Path(scratch), threshold=threshold, engine=engine)
            found = _counted(opened, clusters, across_users)
    words, result = [found.words], found.result
    if out is not None:
        cautions = [near.SHARED_RECORDS_CAUTION] if shared else []
        cautions += [near.ACROSS_USERS_CAUTION] if across_users and against is None else []
        kept = np.setdiff1d(np.arange(opened.num_records), found.removed)
        result["kept"] = write_subset(opened, kept, out, cautions=cautions).records
        result["cautions"] = list(UserStore.open(out).cautions)
        words.append(f"without them: {result['kept']:,} records in {out}")
        words += [f"caution: {caution}" for caution in result["cautions"]]
    common.emit(json, result, "\n".join(words))


@dataclass(frozen=True, kw_only=True)
class _Found:
    """Records to remove, and what is said about them."""

    removed: NDArray[np.int64]
    result: dict[str, Any]
    words: str


def _counted(store: UserStore, clusters: near.Clusters, across_users: bool) -> _Found:
    users = clusters.users_per_cluster(store)
    removed = clusters.copies
    several, most = int((users > 1).sum()), int(users.max(initial=0))
    words = (
        f"{len(removed):,} of {store.num_records:,} records are near-duplicates of an earlier one"
        f"{'' if across_users else ' of the same owners'}, in {clusters.num_clusters:,} clusters\n"
    )
    if across_users:
        words += f"{several:,} clusters are shared by several users, by up to {most:,}"
    else:
        words += "records of different users were not compared: --across-users would"
    return _Found(
        removed=removed,
        result={
            "records": store.num_records,
            "across_users": across_users,
            "clusters": clusters.num_clusters,
            "copies": len(removed),
            "clusters_of_several_users": several if across_users else None,
            "most_users_of_a_cluster": most if across_users else None,
        },
        words=words,
    )


def _against(
    store: UserStore, public: Path, text: str, scratch: Path, threshold: float, engine: EngineName
) -> _Found:
    texts = list(jsonl.texts(public, text))
    shared, removed = near.between(texts, store, scratch, threshold=threshold, engine=engine)
    return _Found(
        removed=removed,
        result={
            "records": store.num_records,
            "public": len(texts),
            "public_in_store": len(shared),
            "copies": len(removed),
        },
        words=f"{len(shared):,} of {len(texts):,} public texts are near-duplicates of "
        f"{len(removed):,} of {store.num_records:,} private records",
    )
