"""Writes batches of records as a store on disk, in bounded memory. An error leaves nothing behind.

Texts go straight to their final file. Their owners go to a staging table of whole numbers, which
the engine turns into the store's two indexes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from userdp.data import relate
from userdp.data.array_files import PSEUDONYM_BYTES, ArrayWriter, file_digest
from userdp.data.contents import IN_WORDS, TextKind
from userdp.data.engine import EngineName, engine_of
from userdp.data.files import (
    TextWriter,
    fingerprint,
    keyed_digest,
    pc,
    read_texts,
)
from userdp.data.identity import DropRule, IdRule, Pseudonyms, Spellings
from userdp.data.prefetch import Prefetched
from userdp.data.record import NO_TIME, ImportBatch, Record, Skipped, batches_of, nothing_to_import
from userdp.errors import InputError
from userdp.files.durable import (
    OWNER_ONLY_DIRECTORY,
    OWNER_ONLY_FILE,
    new_directory,
    write_file,
)

FORMAT = 3

EDGE_SCHEMA = pa.schema([("record", pa.int64()), ("edge", pa.int64()), ("spelling", pa.int32())])

# These files need no checksum of their own, because the fingerprint covers them.
FINGERPRINTED = frozenset({"records.arrow", "record_users_indptr.npy", "record_users.npy"})

HISTORY = "history.json"

EMPTY = "empty text"
OWNERLESS = "no owner left"


@dataclass(frozen=True, kw_only=True)
class ImportResult:
    """What an import did."""

    records: int
    users: int
    edges: int
    skipped: dict[str, int]
    fingerprint: str


def write_store(
    records: Iterable[Record | Skipped],
    out: Path,
    *,
    key: bytes,
    id_rule: IdRule = IdRule.REFUSE,
    first_owner_only: bool = False,
    drop_users: frozenset[str] = frozenset(),
) -> ImportResult:
    """Write the records as a store. On any error, nothing is left behind.

    Records with empty text, and records without an owner outside `drop_users`, are skipped and
    counted.
    """
    return write_batches(
        batches_of(records),
        out,
        pseudonyms=Pseudonyms.under(key),
        id_rule=id_rule,
        first_owner_only=first_owner_only,
        drop=DropRule(ids=drop_users),
    )


def write_batches(
    batches: Iterable[ImportBatch],
    out: Path,
    *,
    pseudonyms: Pseudonyms,
    id_rule: IdRule = IdRule.REFUSE,
    first_owner_only: bool = False,
    drop: DropRule | None = None,
    engine: EngineName = EngineName.DUCKDB,
    cautions: Sequence[str] = (),
    user_splits: Sequence[str] = (),
    population: dict[str, str] | None = None,
) -> ImportResult:
    """Write batches of records as a store, like `write_store` but with every choice.

    `cautions`, `user_splits` and `population` become the attributes of `UserStore` with these
    names.
    """
    if out.exists():
        raise InputError(f"{out} exists: choose another output directory.")
    # Nobody else can look in from the first moment, whatever the mode of a file is until then.
    with new_directory(out, mode=OWNER_ONLY_DIRECTORY) as partial:
        staging = partial / "staging"
        staging.mkdir()
        spellings = Spellings(rule=id_rule, drop=drop or DropRule())
        _write_history(partial, cautions, user_splits, population)
        staged = _stage(batches, partial, spellings)
        result = _finish(staged, partial, spellings, pseudonyms, first_owner_only, engine)
        shutil.rmtree(staging)
        _write_manifest(partial, result, pseudonyms, id_rule, staged.text_kind)
    return result


@dataclass(frozen=True, kw_only=True)
class _Staged:
    """What the first pass knows, after it wrote the texts and the staging table of edges."""

    num_records: int
    may_repeat: bool
    text_digest: bytes
    skipped: Counter[str]
    has_times: bool
    text_kind: TextKind


def _stage(batches: Iterable[ImportBatch], directory: Path, spellings: Spellings) -> _Staged:
    skipped: Counter[str] = Counter()
    num_records = num_edges = 0
    may_repeat = has_times = False
    kinds: set[TextKind] = set()
    with (
        TextWriter(directory / "records.arrow") as texts,
        ArrayWriter(directory / "times.npy") as times,
        pq.ParquetWriter(
            directory / "staging" / "edges.parquet",
            EDGE_SCHEMA,
            compression="none",
            use_dictionary=False,
            write_statistics=False,
        ) as edges,
    ):
        for batch in Prefetched(batches, depth=4):
            skipped.update(batch.skipped)
            # A batch may hold nothing but reasons to skip something.
            kinds |= {batch.text_kind} if len(batch) else set()
            if len(kinds) > 1:
                found = " and some ".join(IN_WORDS[kind] for kind in sorted(kinds))
                raise InputError(f"some sources hold {found}: import them apart.")
            numbers = _spelling_numbers(batch, spellings)
            blank = _is_blank(batch.texts)
            ownerless = ~blank & (batch.owner_counts == 0)
            skipped[EMPTY] += int(blank.sum())
            skipped[OWNERLESS] += int(ownerless.sum())
            keep = ~(blank | ownerless)
            counts = batch.owner_counts
            kept_texts, kept_times = batch.texts, batch.times
            if not keep.all():
                numbers = numbers[np.repeat(keep, counts)]
                counts = counts[keep]
                kept_texts = kept_texts.filter(pa.array(keep))
                kept_times = kept_times[keep] if kept_times is not None else None
            texts.write(kept_texts)
            has_times |= kept_times is not None and bool((kept_times != NO_TIME).any())
            times.write(
                kept_times if kept_times is not None else np.full(len(counts), NO_TIME, np.int64)
            )
            record = np.repeat(np.arange(num_records, num_records + len(counts)), counts)
            may_repeat |= _repeats(record, numbers)
            edge = np.arange(num_edges, num_edges + len(numbers))
            edges.write_batch(pa.record_batch([record, edge, numbers], schema=EDGE_SCHEMA))
            num_records += len(counts)
            num_edges += len(numbers)
    if not has_times:
        (directory / "times.npy").unlink()
    return _Staged(
        num_records=num_records,
        may_repeat=may_repeat or spellings.any_merged,
        text_digest=texts.digest(),
        skipped=skipped,
        has_times=has_times,
        text_kind=kinds.pop() if kinds else "plain",
    )


def _write_history(
    directory: Path,
    cautions: Sequence[str],
    user_splits: Sequence[str],
    population: dict[str, str] | None,
) -> None:
    """Write how the records were chosen from another store. An imported store has no such file.

    The manifest has its checksum, and the store does not open without it.
    """
    if cautions or user_splits or population:
        history: dict[str, Any] = {"cautions": list(cautions), "user_splits": list(user_splits)}
        history |= {"population": population} if population else {}
        (directory / HISTORY).write_text(json.dumps(history, indent=1))


def _spelling_numbers(batch: ImportBatch, spellings: Spellings) -> NDArray[np.int32]:
    """The spelling number of every owner entry of the batch."""

    def where(entry: int) -> str:
        record = int(np.searchsorted(np.cumsum(batch.owner_counts), entry, side="right"))
        return batch.where(record)

    return spellings.numbers_of(batch.owners, batch.decode, where)


def _is_blank(texts: pa.LargeStringArray) -> NDArray[np.bool_]:
    """Which texts are empty or white space only."""
    offsets = _offsets(texts)
    blank = offsets[1:] == offsets[:-1]
    if blank.all():
        return blank
    # Most texts begin with a printing ASCII character. Only the others need a closer look.
    last = int(offsets[-1]) - 1
    first = np.frombuffer(texts.buffers()[2], np.uint8)[np.minimum(offsets[:-1], last)]
    doubtful = ((first <= 32) | (first >= 127)) & ~blank
    if doubtful.any():
        trimmed = pc.utf8_trim_whitespace(texts.filter(pa.array(doubtful)))
        blank[doubtful] = np.asarray(pc.binary_length(trimmed)) == 0
    return blank


def _offsets(texts: pa.LargeStringArray) -> NDArray[np.int64]:
    if not len(texts):
        return np.zeros(1, np.int64)
    start = texts.offset
    return np.frombuffer(texts.buffers()[1], np.int64)[start : start + len(texts) + 1]


def _repeats(record: NDArray[np.int64], numbers: NDArray[np.int32]) -> bool:
    """Whether some record names one spelling twice."""
    if not len(record) or len(record) == record[-1] - record[0] + 1:
        return False
    pairs = (record - record[0]) * (int(numbers.max()) + 1) + numbers
    return len(np.unique(pairs)) < len(pairs)


def _finish(
    staged: _Staged,
    directory: Path,
    spellings: Spellings,
    pseudonyms: Pseudonyms,
    first_owner_only: bool,
    engine_name: EngineName,
) -> ImportResult:
    staging = directory / "staging"
    with engine_of(engine_name, staging) as engine:
        named = relate.persons_of_edges(
            engine.add_parquet("edges", staging / "edges.parquet"),
            engine.load("people", spellings.people()),
            may_repeat=staged.may_repeat,
            first_only=first_owner_only,
        )
        users = engine.hold("users", relate.numbered_users(named))
        kept = engine.hold("kept", relate.kept_edges(named, users))
        persons = engine.fetch(users.order_by("user"))["person"].to_numpy()
        if not len(persons):
            # All that was staged has lost its owners.
            raise nothing_to_import(staged.skipped + Counter({OWNERLESS: staged.num_records}))
        edge_digests, owner_counts = _write_record_index(
            engine.batches(relate.by_record(kept)), directory, staged.num_records
        )
        renumber = _drop_ownerless(directory, owner_counts, staged)
        _write_user_index(engine.batches(relate.by_user(kept)), directory, len(persons), renumber)
    _write_users(directory, [pseudonyms.of(one) for one in spellings.compared_ids(persons)])
    text_digest = staged.text_digest
    if renumber is not None:
        text_digest = _rewrite_texts(directory, owner_counts > 0)
    skipped = staged.skipped + Counter({OWNERLESS: int((owner_counts == 0).sum())})
    return ImportResult(
        records=int((owner_counts > 0).sum()),
        users=len(persons),
        edges=int(owner_counts.sum()),
        skipped={reason: count for reason, count in skipped.items() if count},
        fingerprint=fingerprint(text_digest, *edge_digests, key=pseudonyms.fingerprint_key),
    )


def _write_record_index(
    edges: Iterator[pa.RecordBatch], directory: Path, num_records: int
) -> tuple[tuple[bytes, bytes], NDArray[np.int32]]:
    """Write the index from records to users; return its digests and the owners per record."""
    owner_counts = np.zeros(num_records, np.int32)
    with ArrayWriter(directory / "record_users.npy") as users:
        for batch in Prefetched(edges):
            record: NDArray[np.int64] = batch.column(0).to_numpy()
            users.write(batch.column(1).to_numpy())
            if len(record):
                counts = np.bincount(record - record[0])
                owner_counts[record[0] : record[0] + len(counts)] += counts.astype(np.int32)
    with ArrayWriter(directory / "record_users_indptr.npy") as indptr:
        indptr.write_indptr(owner_counts[owner_counts > 0])
    return (indptr.digest(), users.digest()), owner_counts


def _drop_ownerless(
    directory: Path, owner_counts: NDArray[np.int32], staged: _Staged
) -> NDArray[np.int64] | None:
    """The new number of every staged record, or None if all are kept."""
    kept = owner_counts > 0
    if kept.all():
        return None
    if staged.has_times:
        times = np.load(directory / "times.npy")
        np.save(directory / "times.npy", times[kept])
    return np.cumsum(kept) - 1


def _write_user_index(
    edges: Iterator[pa.RecordBatch],
    directory: Path,
    num_users: int,
    renumber: NDArray[np.int64] | None,
) -> None:
    """Write the index from users to records."""
    per_user = np.zeros(num_users, np.int64)
    with ArrayWriter(directory / "user_records.npy") as records:
        for batch in Prefetched(edges):
            per_user += np.bincount(batch.column(0).to_numpy(), minlength=num_users)
            record: NDArray[np.int64] = batch.column(1).to_numpy()
            records.write(record if renumber is None else renumber[record])
    with ArrayWriter(directory / "user_records_indptr.npy") as indptr:
        indptr.write_indptr(per_user)


def _rewrite_texts(directory: Path, keep: NDArray[np.bool_]) -> bytes:
    """Keep only the texts of kept records, and return their digest."""
    source, target = directory / "records.arrow", directory / "records.new"
    start = 0
    with TextWriter(target) as writer:
        for chunk in read_texts(source).chunks:
            writer.write(chunk.filter(pa.array(keep[start : start + len(chunk)])))
            start += len(chunk)
    os.replace(target, source)
    return writer.digest()


def _write_users(directory: Path, pseudonyms: list[bytes]) -> None:
    schema = pa.schema([("pseudonym", pa.binary(PSEUDONYM_BYTES))])
    with (
        pa.OSFile(str(directory / "users.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, schema) as writer,
    ):
        column = pa.array(pseudonyms, pa.binary(PSEUDONYM_BYTES))
        writer.write_batch(pa.record_batch([column], schema))


def history_digest(directory: Path, fingerprint: str, key: bytes) -> str:
    """A keyed digest of a store's history, which may be none, together with its data's name."""
    path = directory / HISTORY
    content = path.read_bytes() if path.is_file() else b""
    return keyed_digest(f"history of {fingerprint}\n".encode() + content, key=key)


def _write_manifest(
    directory: Path, result: ImportResult, pseudonyms: Pseudonyms, id_rule: IdRule, kind: TextKind
) -> None:
    files = sorted(path for path in directory.iterdir() if path.is_file())
    for path in files:
        path.chmod(OWNER_ONLY_FILE)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "records": result.records,
        "users": result.users,
        "edges": result.edges,
        "fingerprint": result.fingerprint,
        "key_name": pseudonyms.key_name(id_rule),
        # This key never leaves the store. It lies beside the texts, which reveal more than it does.
        "fingerprint_key": pseudonyms.fingerprint_key.hex(),
        "text_kind": kind,
        "history": history_digest(directory, result.fingerprint, pseudonyms.fingerprint_key),
        "sizes": {path.name: path.stat().st_size for path in files},
        "sha256": {
            path.name: file_digest(path) for path in files if path.name not in FINGERPRINTED
        },
    }
    write_file(
        directory / "manifest.json",
        json.dumps(manifest, indent=1).encode(),
        mode=OWNER_ONLY_FILE,
    )
