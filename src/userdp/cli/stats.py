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

QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


def stats(
    store: Annotated[Path, typer.Argument(help="Directory of a user store.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="Also count tokens, with this tokenizer (name or folder).")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every file and compare its checksum first.")
    ] = False,
    json: common.Json = False,
) -> None:
    """Describe a store. What it prints is private: it describes the users themselves."""
    opened = UserStore.open(store)
    if verify:
        opened.verify()
    per_user, per_record = opened.records_per_user(), opened.users_per_record()
    sizes = opened.bytes_per_record()
    result: dict[str, Any] = {
        "records": opened.num_records,
        "users": opened.num_users,
        "edges": len(opened.record_users),
        "text_bytes": int(sizes.sum()),
        "records_per_user": _summary(per_user),
        "users_per_record": _summary(per_record),
        "bytes_per_record": _summary(sizes),
        "share_of_top_percent": _share_of_top_percent(per_user),
        "fingerprint": opened.fingerprint,
        "cautions": list(opened.cautions),
    }
    words = [
        f"{opened.num_records:,} records, {opened.num_users:,} users, "
        f"{len(opened.record_users):,} edges, {result['text_bytes']:,} bytes of text",
        _section("records per user", per_user),
        f"the 1% of users with most records hold {result['share_of_top_percent']:.1%} of them",
        _section("users per record", per_record),
        _section("bytes per record", sizes),
    ]
    if tokenizer is not None:
        tokens = _tokens_per_record(opened, tokenizer)
        result["tokens_per_record"] = _summary(tokens)
        words.append(_section("tokens per record", tokens))
    words += [f"caution: {caution}" for caution in opened.cautions]
    words.append("private: these numbers describe the users themselves; do not publish them.")
    common.emit(json, result, "\n\n".join(words))


def _tokens_per_record(opened: UserStore, tokenizer: str) -> NDArray[np.int64]:
    common.quiet_transformers()
    from userdp.data.tokens import tokens_per_record
    from userdp.models.load import load_tokenizer

    return tokens_per_record(opened, load_tokenizer(tokenizer))


def _section(title: str, counts: NDArray[np.int64]) -> str:
    summary = _summary(counts)
    quantiles = ", ".join(f"{share} {value:g}" for share, value in summary["quantiles"].items())
    return (
        f"{title}: min {summary['min']:,}, median {summary['median']:g}, "
        f"mean {summary['mean']:.3f}, max {summary['max']:,}\n"
        f"quantiles: {quantiles}\n{log2_histogram(counts)}"
    )


def _summary(counts: NDArray[np.int64]) -> dict[str, Any]:
    return {
        "min": int(counts.min()),
        "median": float(np.median(counts)),
        "mean": float(counts.mean()),
        "max": int(counts.max()),
        "quantiles": {
            f"{share:.0%}": float(value)
            for share, value in zip(QUANTILES, np.quantile(counts, QUANTILES), strict=True)
        },
    }


def _share_of_top_percent(per_user: NDArray[np.int64]) -> float:
    top = np.sort(per_user)[::-1][: max(1, len(per_user) // 100)]
    return float(top.sum() / per_user.sum())
