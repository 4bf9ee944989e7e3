"""`userdp split`: training and held-out stores."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from userdp.cli import common
from userdp.data import split as splits
from userdp.data.store import ImportResult, UserStore
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
    share: Annotated[
        float,
        typer.Option(help="Probability of a user to be held out, or share of each user's records."),
    ] = 0.1,
    at_most: Annotated[int, typer.Option(help="With --by beginning: most records a user.")] = 32,
    before: Annotated[
        str | None, typer.Option(help="With --by time: train on what is older (ISO 8601).")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="With --by user: another seed, other users.")
    ] = 0,
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
    _refuse_outputs(train, held_out)
    opened = UserStore.open(store)
    if by is SplitBy.USER:
        chosen = splits.by_user(opened, share=share, seed=seed)
    elif by is SplitBy.BEGINNING:
        chosen = splits.beginning_of_each_user(opened, share=share, at_most=at_most)
    else:
        chosen = splits.by_time(opened, cutoff=_seconds(before))
    first = splits.write_subset(opened, chosen.train, train, made_by=chosen.made_by)
    try:
        second = splits.write_subset(opened, chosen.held_out, held_out, made_by=chosen.made_by)
    except BaseException:
        # A single side would look like a finished split.
        shutil.rmtree(train)
        raise
    common.emit(
        json,
        {
            "train": {"records": first.records, "users": first.users},
            "held_out": {"records": second.records, "users": second.users},
            "left_out": chosen.left_out,
            "users_left_out": chosen.users_left_out,
            "users_cut": chosen.users_cut,
            "shares_users": chosen.shares_users,
        },
        "\n".join(_words(chosen, first, second, train, held_out, share)),
    )


def _refuse_outputs(train: Path, held_out: Path) -> None:
    """Raise, before anything is written, if the two stores cannot both be written."""
    for path in (train, held_out):
        if path.exists():
            raise InputError(f"{path} exists: choose another output directory.")
    one, other = train.resolve(), held_out.resolve()
    if one == other or one in other.parents or other in one.parents:
        raise InputError(
            f"--train {train} and --held-out {held_out} are one directory, or one is inside the "
            "other: the parts of a split must be apart. Choose two directories."
        )


def _words(
    chosen: splits.Split,
    first: ImportResult,
    second: ImportResult,
    train: Path,
    held_out: Path,
    share: float,
) -> list[str]:
    rows = (
        ("training", first.records, first.users, str(train)),
        ("held out", second.records, second.users, str(held_out)),
        ("in neither", chosen.left_out, chosen.users_left_out, ""),
    )
    lines = [f"{'':<10} {'records':>14} {'users':>14}"]
    lines += [
        f"{name:<10} {records:>14,} {users:>14,}  {where}".rstrip()
        for name, records, users, where in rows
    ]
    if chosen.users_cut:
        lines.append(f"{chosen.users_cut:,} users kept some records and lost others")
    if chosen.shares_users:
        lines.append("users may be on both sides")
    else:
        lines.append(
            f"each user was held out with probability {share:g}, on their own: the share is met "
            "on average"
        )
        if chosen.left_out:
            lines.append("in neither: records whose owners are on both sides")
    return lines


def _seconds(moment: str | None) -> int:
    if moment is None:
        raise InputError("--by time needs --before DATE.")
    try:
        parsed = datetime.fromisoformat(moment)
    except ValueError:
        raise InputError(f"--before {moment}: give a date such as 2018-01-01.") from None
    return int((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp())
