"""`userdp stats`: what is in a store, with histograms."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from userdp.cli import common
from userdp.data.store import UserStore
from userdp.report.bars import log2_histogram


def stats(
    store: Annotated[Path, typer.Argument(help="Directory of a user store.")],
    json: common.Json = False,
) -> None:
    """Describe a store. What it prints is private: it describes the users themselves."""
    opened = UserStore.open(store)
    per_user, per_record = opened.records_per_user(), opened.users_per_record()
    common.emit(
        json,
        {
            "records": opened.num_records,
            "users": opened.num_users,
            "edges": len(opened.record_users),
            "records_per_user": _summary(per_user),
            "users_per_record": _summary(per_record),
            "share_of_top_percent": _share_of_top_percent(per_user),
            "fingerprint": opened.fingerprint,
        },
        f"{opened.num_records:,} records, {opened.num_users:,} users, "
        f"{len(opened.record_users):,} edges\n\n"
        f"records per user: {_in_words(_summary(per_user))}\n{log2_histogram(per_user)}\n"
        f"the 1% of users with most records hold {_share_of_top_percent(per_user):.1%} of them\n\n"
        f"users per record: {_in_words(_summary(per_record))}\n{log2_histogram(per_record)}\n\n"
        "private: these numbers describe the users themselves; do not publish them.",
    )


def _summary(counts: NDArray[np.int64]) -> dict[str, Any]:
    return {
        "min": int(counts.min()),
        "median": float(np.median(counts)),
        "mean": float(counts.mean()),
        "max": int(counts.max()),
    }


def _in_words(summary: dict[str, Any]) -> str:
    return (
        f"min {summary['min']:,}, median {summary['median']:g}, mean {summary['mean']:.3f}, "
        f"max {summary['max']:,}"
    )


def _share_of_top_percent(per_user: NDArray[np.int64]) -> float:
    top = np.sort(per_user)[::-1][: max(1, len(per_user) // 100)]
    return float(top.sum() / per_user.sum())
