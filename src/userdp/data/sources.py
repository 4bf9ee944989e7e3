"""Which importer reads a source: the one the caller names, or one chosen by name and content."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from userdp.data.importers import (
    arrow,
    csv,
    dialogue,
    git,
    jsonl,
    mailbox,
    stackexchange,
)
from userdp.data.importers.columns import Columns
from userdp.data.importers.mail import MailRules
from userdp.data.record import ImportBatch, Skipped, batches_of
from userdp.errors import InputError


class Format(StrEnum):
    """What a source is written in."""

    AUTO = "auto"
    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"
    HF = "hf"
    MBOX = "mbox"
    MAILDIR = "maildir"
    STACKEXCHANGE = "stackexchange"
    GIT = "git"
    DIALOGUE = "dialogue"


BY_SUFFIX = {
    ".jsonl": Format.JSONL,
    ".ndjson": Format.JSONL,
    ".csv": Format.CSV,
    ".tsv": Format.CSV,
    ".parquet": Format.PARQUET,
    ".mbox": Format.MBOX,
    ".eml": Format.MAILDIR,
    ".xml": Format.STACKEXCHANGE,
    ".txt": Format.DIALOGUE,
}
# A file of this name is taken for what it mostly is if it is named itself. In a folder it is mostly
# a description of the data beside it.
BY_SUFFIX_ALONE = {".json": Format.JSONL}
LINK = Skipped("a link in a folder: not followed")
HAVE_COLUMNS = frozenset({Format.JSONL, Format.CSV, Format.PARQUET, Format.HF})
FOLDERS_ARE_SOURCES = frozenset({Format.HF, Format.MAILDIR, Format.GIT})


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How sources are to be read."""

    format: Format = Format.AUTO
    columns: Columns = field(default_factory=Columns)
    mail: MailRules = field(default_factory=MailRules)
    threads: bool = False


def read(sources: list[str], reading: Reading, scratch: Path) -> Iterator[ImportBatch]:
    """The records of all sources in the given order. Files of a folder or a glob go by name."""
    found: list[tuple[Path, Format]] = []
    links = 0
    for source in sources:
        inside = _found(source, reading.format)
        found += inside
        # A saved dataset names its files, and git keeps links of its own: neither is searched.
        if not {Format.HF, Format.GIT}.intersection(format for _, format in inside):
            links += _links_in(Path(source))
    if reading.threads and any(format is not Format.STACKEXCHANGE for _, format in found):
        raise InputError("--threads is for Stack Exchange dumps.")
    if reading.columns.text_kind != "plain" and any(f not in HAVE_COLUMNS for _, f in found):
        raise InputError(
            "--completion and --label name columns: they are for JSON Lines, CSV, Parquet and "
            "Hugging Face datasets."
        )
    if reading.threads:
        # All files together are one source, because comments belong to the threads of posts.
        paths = [path for path, _ in found]
        yield from batches_of([LINK] * links)
        yield from batches_of(stackexchange.thread_records(paths, reading.columns, scratch))
        return
    yield from batches_of([LINK] * links)
    for path, format in found:
        yield from _batches(path, format, reading, scratch)


def _batches(path: Path, format: Format, reading: Reading, scratch: Path) -> Iterator[ImportBatch]:
    columns = reading.columns
    match format:
        case Format.JSONL:
            return jsonl.batches(path, columns, scratch)
        case Format.CSV:
            return csv.batches(path, columns, scratch)
        case Format.PARQUET:
            return arrow.parquet_batches(path, columns)
        case Format.HF:
            return arrow.saved_dataset_batches(path, columns)
        case Format.MBOX:
            return batches_of(mailbox.mbox_records(path, reading.mail))
        case Format.MAILDIR:
            return batches_of(mailbox.tree_records(path, reading.mail))
        case Format.STACKEXCHANGE:
            return batches_of(stackexchange.records([path], columns))
        case Format.GIT:
            return batches_of(git.records(path))
        case Format.DIALOGUE:
            return batches_of(dialogue.records(path))
        case Format.AUTO:
            raise AssertionError("resolved before")


def _found(source: str, format: Format) -> list[tuple[Path, Format]]:
    """The files, or folders, that a source means, each with its format."""
    paths = [Path(source)]
    if not paths[0].exists():
        paths = [Path(name) for name in sorted(glob.glob(source, recursive=True))]
    if not paths:
        raise InputError(f"{source}: no such file, and no file matches it.")
    found: list[tuple[Path, Format]] = []
    for path in paths:
        chosen = _format_of(path) if format is Format.AUTO else format
        if path.is_dir() and chosen not in FOLDERS_ARE_SOURCES:
            inside = [file for file in _files_in(path) if _by_suffix(file) is chosen]
            if chosen is Format.STACKEXCHANGE:
                inside = [file for file in inside if file.stem in ("Posts", "Comments")]
            if not inside:
                raise InputError(
                    f"{path}: holds no {chosen.value} file. Links in a folder are not followed."
                )
            found += [(file, chosen) for file in inside]
        elif not path.is_dir() and chosen in (Format.HF, Format.GIT):
            raise InputError(f"{path}: a {chosen.value} source is a folder.")
        else:
            found.append((path, chosen))
    return found


def _files_in(folder: Path) -> list[Path]:
    # Links are not followed: they could lead out of the folder.
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    # Posts before Comments: the order of a Stack Exchange dump.
    return sorted(files, key=lambda path: (path.parent, path.stem == "Comments", path.name))


def _links_in(folder: Path) -> int:
    """How many links a folder holds, at any depth; none for a file."""
    return sum(path.is_symlink() for path in folder.rglob("*")) if folder.is_dir() else 0


def _by_suffix(path: Path, known: Mapping[str, Format] = BY_SUFFIX) -> Format | None:
    for suffix in reversed(path.suffixes):
        if suffix in known:
            return known[suffix]
    return None


def _format_of(path: Path) -> Format:
    if path.is_dir():
        return _format_of_folder(path)
    format = _by_suffix(path, BY_SUFFIX | BY_SUFFIX_ALONE)
    if format is None:
        known = ", ".join(BY_SUFFIX)
        raise InputError(
            f"{path.name}: the format cannot be told from the name ({known}). Give --format."
        )
    return format


def _format_of_folder(folder: Path) -> Format:
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        return Format.HF
    if (folder / ".git").exists() or ((folder / "HEAD").is_file() and (folder / "refs").is_dir()):
        return Format.GIT
    if (folder / "cur").is_dir() or (folder / "new").is_dir():
        return Format.MAILDIR
    inside = {format for file in _files_in(folder) if (format := _by_suffix(file)) is not None}
    if len(inside) == 1:
        return inside.pop()
    raise InputError(
        f"{folder}: the format of what is inside cannot be told. Give --format, for mail in single "
        "files --format maildir."
    )
