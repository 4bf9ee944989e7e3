"""`userdp import`: sources to a user store."""

from __future__ import annotations

import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from userdp.cli import common
from userdp.data.append import append_batches
from userdp.data.engine import EngineName
from userdp.data.identity import (
    DropRule,
    IdRule,
    Pseudonyms,
    forget_key,
    key_beside,
    load_or_create_key,
)
from userdp.data.importers.columns import Columns
from userdp.data.importers.mail import MailRules
from userdp.data.sources import Format, Reading, read
from userdp.data.store import UserStore, write_batches
from userdp.errors import InputError


class Owners(StrEnum):
    """Which of a record's listed owners count."""

    ALL = "all"
    FIRST = "first"


def import_(
    sources: Annotated[list[str], typer.Argument(help="Files, folders or globs to import.")],
    out: Annotated[Path, typer.Option(help="Directory of the store to write.")],
    format: Annotated[Format, typer.Option(help="Format of the sources.")] = Format.AUTO,
    user: Annotated[
        str | None, typer.Option(help="Column with the owners, or a template: '{site}/{id}'.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Column with the text, or a template: '{title}\\n\\n{body}'.")
    ] = None,
    time: Annotated[
        str | None, typer.Option(help="Column with the time of writing, for splits by time.")
    ] = None,
    completion: Annotated[
        str | None,
        typer.Option(help="Column that completes the text, its prompt. It alone carries loss."),
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="Column with the class of the text, for classification.")
    ] = None,
    owners: Annotated[
        Owners,
        typer.Option(
            help="All listed owners count, or only the first who is not dropped: the sender, the "
            "author."
        ),
    ] = Owners.ALL,
    threads: Annotated[
        bool, typer.Option("--threads", help="Stack Exchange: whole threads, owned by all writers.")
    ] = False,
    drop_user: Annotated[
        list[str] | None, typer.Option(help="An id that is no person: a list, a bot. Repeatable.")
    ] = None,
    drop_matching: Annotated[
        str | None, typer.Option(help="Drop ids that match this regular expression as a whole.")
    ] = None,
    keep_lists: Annotated[
        bool, typer.Option("--keep-lists", help="Mail: addresses of mailing lists are users too.")
    ] = False,
    keep_forwarded: Annotated[
        bool, typer.Option("--keep-forwarded", help="Mail: keep what is above a forwarded message.")
    ] = False,
    keep_repetitive: Annotated[
        bool, typer.Option("--keep-repetitive", help="Mail: keep messages that repeat 20 words.")
    ] = False,
    keep_short: Annotated[
        bool, typer.Option("--keep-short", help="Mail: keep messages of fewer than 4 own words.")
    ] = False,
    ids: Annotated[
        IdRule, typer.Option(help="Ids that differ only in case, width or white space.")
    ] = IdRule.REFUSE,
    key: Annotated[
        Path | None,
        typer.Option(help="Pseudonym key; share it between stores to compare their users."),
    ] = None,
    append: Annotated[
        Path | None,
        typer.Option(help="A store whose records come first; both share one budget."),
    ] = None,
    engine: Annotated[EngineName, typer.Option(help="What groups and joins.")] = EngineName.DUCKDB,
    json: common.Json = False,
) -> None:
    """Turn files of records into a user store."""
    if out.exists():
        raise InputError(f"{out} exists: choose another output directory.")
    reading = Reading(
        format=format,
        columns=Columns(user=user, text=text, time=time, completion=completion, label=label),
        mail=MailRules(
            keep_forwarded=keep_forwarded,
            keep_repetitive=keep_repetitive,
            keep_lists=keep_lists,
            keep_short=keep_short,
        ),
        threads=threads,
    )
    drop = DropRule(ids=frozenset(drop_user or ()), matching=drop_matching)
    parent = UserStore.open(append) if append is not None else None
    key_path = key or key_beside(append or out)
    key_is_new = not key_path.exists()
    if parent is not None:
        parent.verify()
        if key_is_new:
            raise InputError(
                f"{key_path} is not there: to append to {append}, give the --key that it was "
                "imported with. Somebody in both parts would else count as two users."
            )
    try:
        with (
            tempfile.TemporaryDirectory(prefix="userdp-") as scratch,
            common.counting("importing", "batches of records") as count,
        ):
            batches = count(read(sources, reading, Path(scratch)))
            pseudonyms = Pseudonyms.under(load_or_create_key(key_path))
            options: dict[str, Any] = {
                "pseudonyms": pseudonyms,
                "id_rule": ids,
                "first_owner_only": owners is Owners.FIRST,
                "drop": drop,
                "engine": engine,
            }
            if parent is None:
                result = write_batches(batches, out, **options)
            else:
                room = Path(scratch) / "append"
                room.mkdir()
                result = append_batches(parent, batches, out, scratch=room, **options)
    except BaseException:
        if key_is_new:
            forget_key(key_path, is_own_folder=key is None)
        raise
    common.emit(
        json,
        {
            "records": result.records,
            "users": result.users,
            "edges": result.edges,
            "skipped": result.skipped,
            "fingerprint": result.fingerprint,
            "key": str(key_path),
            **({"appended_to": str(append)} if append is not None else {}),
        },
        f"{result.records:,} records of {result.users:,} users ({result.edges:,} edges) in {out}\n"
        + "".join(f"skipped {count:,}: {reason}\n" for reason, count in result.skipped.items())
        + f"pseudonym key: {key_path} (keep it apart from the store)",
    )
