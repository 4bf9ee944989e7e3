"""`userdp split`: training and held-out stores."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from userdp.cli import common
from userdp.data import split as splits
from userdp.data.store import UserStore
from userdp.errors import InputError


class SplitBy(StrEnum):
    """What decides the side of a record."""

    USER = "user"
    BEGINNING = "beginning"
    TIME = "time"


def split(
    store: Annotated[Path, typer.Argument(help="Directory of a user store.")],
    train: Annotated[Path, typer.Option(help="Store to write for training.")],
    held_out: Annotated[Path, typer.Option(help="Store to write for evaluation.")],
    by: Annotated[
        SplitBy, typer.Option(help="Whole users, each user's first records, or a date.")
    ] = SplitBy.USER,
    share: Annotated[float, typer.Option(help="Share of users, or of each user's records.")] = 0.1,
    at_most: Annotated[int, typer.Option(help="With --by beginning: most records a user.")] = 32,
    before: Annotated[
        str | None, typer.Option(help="With --by time: train on what is older (ISO 8601).")
    ] = None,
    seed: Annotated[int, typer.Option(help="With --by user: which users are drawn.")] = 0,
    allow_shared_users: Annotated[
        bool, typer.Option("--allow-shared-users", help="Users may be on both sides.")
    ] = False,
    json: common.Json = False,
) -> None:
    """Split a store into one for training and one for evaluation."""
    if by is not SplitBy.USER and not allow_shared_users:
        raise InputError(
            f"--by {by.value} puts users on both sides, so the held-out loss says nothing about "
            "new users. Say --allow-shared-users if that is meant, or split --by user."
        )
    for path in (train, held_out):
        if path.exists():
            raise InputError(f"{path} exists: choose another output directory.")
    opened = UserStore.open(store)
    if by is SplitBy.USER:
        chosen = splits.by_user(opened, share=share, rng=np.random.default_rng(seed))
    elif by is SplitBy.BEGINNING:
        chosen = splits.beginning_of_each_user(opened, share=share, at_most=at_most)
    else:
        chosen = splits.by_time(opened, cutoff=_seconds(before))
    first = splits.write_subset(opened, chosen.train, train)
    second = splits.write_subset(opened, chosen.held_out, held_out)
    common.emit(
        json,
        {
            "train": {"records": first.records, "users": first.users},
            "held_out": {"records": second.records, "users": second.users},
            "left_out": chosen.left_out,
            "shares_users": chosen.shares_users,
        },
        f"training: {first.records:,} records of {first.users:,} users in {train}\n"
        f"held out: {second.records:,} records of {second.users:,} users in {held_out}\n"
        f"in neither: {chosen.left_out:,} records"
        + ("\nusers may be on both sides" if chosen.shares_users else ""),
    )


def _seconds(moment: str | None) -> int:
    if moment is None:
        raise InputError("--by time needs --before DATE.")
    try:
        parsed = datetime.fromisoformat(moment)
    except ValueError:
        raise InputError(f"--before {moment}: give a date such as 2018-01-01.") from None
    return int((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp())
