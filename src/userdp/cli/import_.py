"""`userdp import`: sources to a user store."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from userdp.cli import common
from userdp.data.identity import IdRule, load_or_create_key
from userdp.data.importers import jsonl
from userdp.data.record import Record
from userdp.data.store import write_store
from userdp.errors import InputError


class Format(StrEnum):
    """What a source is written in."""

    AUTO = "auto"
    JSONL = "jsonl"


class Owners(StrEnum):
    """Which of a record's listed owners count."""

    ALL = "all"
    FIRST = "first"


def import_(
    sources: Annotated[list[Path], typer.Argument(help="Files to import.")],
    out: Annotated[Path, typer.Option(help="Directory of the store to write.")],
    format: Annotated[Format, typer.Option(help="Format of the sources.")] = Format.AUTO,
    user: Annotated[str | None, typer.Option(help="Column with the owner or owners.")] = None,
    text: Annotated[str | None, typer.Option(help="Column with the text.")] = None,
    owners: Annotated[Owners, typer.Option(help="Which listed owners count.")] = Owners.ALL,
    drop_user: Annotated[
        list[str] | None, typer.Option(help="An id that is no person: a list, a bot. Repeatable.")
    ] = None,
    ids: Annotated[
        IdRule, typer.Option(help="Ids that differ only in case, width or white space.")
    ] = IdRule.REFUSE,
    key: Annotated[
        Path | None,
        typer.Option(help="Pseudonym key; share it between stores to compare their users."),
    ] = None,
    json: common.Json = False,
) -> None:
    """Turn files of records into a user store."""
    if out.exists():
        raise InputError(f"{out} exists: choose another output directory.")
    key_path = key or out.with_name(out.name + ".key")
    with common.counting("importing", "records") as count:
        read = chain.from_iterable(_read(source, format, user, text) for source in sources)
        result = write_store(
            count(read),
            out,
            key=load_or_create_key(key_path),
            id_rule=ids,
            first_owner_only=owners is Owners.FIRST,
            drop_users=frozenset(drop_user or ()),
        )
    common.emit(
        json,
        {
            "records": result.records,
            "users": result.users,
            "edges": result.edges,
            "skipped": result.skipped,
            "fingerprint": result.fingerprint,
            "key": str(key_path),
        },
        f"{result.records:,} records of {result.users:,} users ({result.edges:,} edges) in {out}\n"
        + "".join(f"skipped {count:,}: {reason}\n" for reason, count in result.skipped.items())
        + f"pseudonym key: {key_path} (keep it apart from the store)",
    )


def _read(source: Path, format: Format, user: str | None, text: str | None) -> Iterator[Record]:
    if format is Format.AUTO and not {".jsonl", ".ndjson"} & set(source.suffixes):
        raise InputError(
            f"{source.name}: the format cannot be told from the name. Give --format jsonl."
        )
    return jsonl.records(source, user=user, text=text)
