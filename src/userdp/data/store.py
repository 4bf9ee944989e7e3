"""The user store: records, users, and the edges between them, memory-mapped from disk.

A store is a directory:

    manifest.json                          counts, fingerprint, file checksums, name of the id key
    records.arrow                          column `text`
    users.arrow                            column `pseudonym`: a keyed hash of each user's id
    record_users_indptr.npy, record_users.npy    owners of record i, numbers by first appearance
    user_records_indptr.npy, user_records.npy    records of user i

Everything in it is private. The fingerprint covers texts and edges, not the pseudonyms: it names the
data a run was bound to.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from userdp.data.identity import PSEUDONYM_BYTES, Identities, IdRule, key_name, normalise
from userdp.data.record import Record
from userdp.errors import InputError

FORMAT = 1
BATCH_RECORDS = 8192


@dataclass(frozen=True, kw_only=True)
class UserStore:
    """An opened store. Arrays are memory-mapped: opening reads almost nothing."""

    path: Path
    manifest: dict[str, Any]
    texts: pa.ChunkedArray
    pseudonyms: pa.ChunkedArray
    record_users_indptr: NDArray[np.int64]
    record_users: NDArray[np.int64]
    user_records_indptr: NDArray[np.int64]
    user_records: NDArray[np.int64]

    def __repr__(self) -> str:
        return f"UserStore({str(self.path)!r})"

    @property
    def num_records(self) -> int:
        """How many records there are: secret."""
        return len(self.record_users_indptr) - 1

    @property
    def num_users(self) -> int:
        """How many users there are: secret."""
        return len(self.user_records_indptr) - 1

    @property
    def fingerprint(self) -> str:
        """Names the texts and edges; a run is bound to it."""
        return self.manifest["fingerprint"]

    @staticmethod
    def open(path: str | Path) -> UserStore:
        """Open a store, checking that its files are those the manifest names."""
        path = Path(path)
        manifest_path = path / "manifest.json"
        if not manifest_path.is_file():
            raise InputError(f"{path} is not a user store: it has no manifest.json.")
        try:
            manifest: dict[str, Any] = json.loads(manifest_path.read_bytes())
        except ValueError:
            raise InputError(f"{manifest_path}: not valid JSON; import the data again.") from None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:  # pyright: ignore
            raise InputError(f"{path}: written in a format this version does not read.")
        for name, size in manifest["sizes"].items():
            if not (path / name).is_file() or (path / name).stat().st_size != size:
                raise InputError(f"{path / name}: missing or changed since the import.")

        def array(name: str) -> NDArray[np.int64]:
            return np.load(path / name, mmap_mode="r")

        return UserStore(
            path=path,
            manifest=manifest,
            texts=_read_column(path / "records.arrow", "text"),
            pseudonyms=_read_column(path / "users.arrow", "pseudonym"),
            record_users_indptr=array("record_users_indptr.npy"),
            record_users=array("record_users.npy"),
            user_records_indptr=array("user_records_indptr.npy"),
            user_records=array("user_records.npy"),
        )

    def verify(self) -> None:
        """Read every file and compare its checksum with the manifest."""
        for name, digest in self.manifest["sha256"].items():
            if _file_digest(self.path / name) != digest:
                raise InputError(f"{self.path / name}: changed since the import.")

    def text(self, record: int) -> str:
        """The text of one record."""
        return self.texts[record].as_py()

    def records_of(self, user: int) -> NDArray[np.int64]:
        """The records of one user."""
        return self.user_records[
            self.user_records_indptr[user] : self.user_records_indptr[user + 1]
        ]

    def records_per_user(self) -> NDArray[np.int64]:
        """How many records each user has."""
        return np.diff(self.user_records_indptr)

    def users_per_record(self) -> NDArray[np.int64]:
        """How many owners each record has."""
        return np.diff(self.record_users_indptr)

    def sole_owners(self) -> NDArray[np.int64]:
        """The owner of each record, where every record has exactly one.

        Several owners are refused: a plan that charges a record to one of them leaves the others
        unprotected.
        """
        shared = int((self.users_per_record() > 1).sum())
        if shared:
            raise InputError(
                f"{self.path}: {shared:,} of {self.num_records:,} records have several owners, and "
                "charging them to one leaves the others unprotected. Import with --owners first "
                "only if one owner is the whole truth, or bound contributions first."
            )
        return np.asarray(self.record_users)

    def shares_users_with(self, other: UserStore) -> int | None:
        """How many users are in both stores; None if their ids were hidden under different keys."""
        if self.manifest["key_name"] != other.manifest["key_name"]:
            return None
        ours = set(self.pseudonyms.to_pylist())
        return len(ours.intersection(other.pseudonyms.to_pylist()))


@dataclass(frozen=True, kw_only=True)
class ImportResult:
    """What an import did."""

    records: int
    users: int
    edges: int
    skipped: dict[str, int]
    fingerprint: str


def write_store(
    records: Iterable[Record],
    out: Path,
    *,
    key: bytes,
    id_rule: IdRule = IdRule.REFUSE,
    first_owner_only: bool = False,
    drop_users: frozenset[str] = frozenset(),
) -> ImportResult:
    """Write the records as a store; on any error nothing is left behind.

    Records with empty text, or without an owner once `drop_users` are gone, are skipped and counted.
    """
    if out.exists():
        raise InputError(f"{out} exists: choose another output directory.")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        result = _write(records, partial, key, id_rule, first_owner_only, drop_users)
        os.replace(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return result


def _write(
    records: Iterable[Record],
    directory: Path,
    key: bytes,
    id_rule: IdRule,
    first_owner_only: bool,
    drop_users: frozenset[str],
) -> ImportResult:
    identities = Identities(id_rule, key)
    dropped = {normalise(user) for user in drop_users}
    skipped: Counter[str] = Counter()
    owner_counts: list[int] = []
    owners: list[int] = []
    digest = hashlib.sha256()

    schema = pa.schema([("text", pa.large_string())])
    with pa.OSFile(str(directory / "records.arrow"), "wb") as sink:
        with pa.ipc.new_file(sink, schema) as writer:
            texts: list[str] = []

            def flush() -> None:
                writer.write_batch(pa.record_batch([pa.array(texts, pa.large_string())], schema))
                texts.clear()

            for record in records:
                kept = [owner for owner in record.owners if normalise(owner) not in dropped]
                if not record.text.strip():
                    skipped["empty text"] += 1
                    continue
                if not kept:
                    skipped["no owner left"] += 1
                    continue
                chosen = kept[:1] if first_owner_only else kept
                numbers = list(
                    dict.fromkeys(identities.number_of(owner, record.where) for owner in chosen)
                )
                owner_counts.append(len(numbers))
                owners += numbers
                encoded = record.text.encode()
                digest.update(len(encoded).to_bytes(8, "little") + encoded)
                texts.append(record.text)
                if len(texts) >= BATCH_RECORDS:
                    flush()
            flush()

    if not owner_counts:
        raise InputError("no record was found: there is nothing to import.")
    record_users_indptr = np.concatenate([[0], np.cumsum(owner_counts)]).astype(np.int64)
    record_users = np.asarray(owners, dtype=np.int64)
    record_of_edge = np.repeat(np.arange(len(owner_counts)), owner_counts)
    by_user = np.argsort(record_users, kind="stable")
    per_user = np.bincount(record_users, minlength=len(identities))
    np.save(directory / "record_users_indptr.npy", record_users_indptr)
    np.save(directory / "record_users.npy", record_users)
    np.save(
        directory / "user_records_indptr.npy",
        np.concatenate([[0], np.cumsum(per_user)]).astype(np.int64),
    )
    np.save(directory / "user_records.npy", record_of_edge[by_user].astype(np.int64))
    digest.update(record_users_indptr.astype("<i8").tobytes())
    digest.update(record_users.astype("<i8").tobytes())

    user_schema = pa.schema([("pseudonym", pa.binary(PSEUDONYM_BYTES))])
    with pa.OSFile(str(directory / "users.arrow"), "wb") as sink:
        with pa.ipc.new_file(sink, user_schema) as writer:
            column = pa.array(identities.pseudonyms, pa.binary(PSEUDONYM_BYTES))
            writer.write_batch(pa.record_batch([column], user_schema))

    result = ImportResult(
        records=len(owner_counts),
        users=len(identities),
        edges=len(owners),
        skipped=dict(skipped),
        fingerprint=digest.hexdigest(),
    )
    _write_manifest(directory, result, key)
    return result


def _write_manifest(directory: Path, result: ImportResult, key: bytes) -> None:
    files = sorted(path for path in directory.iterdir() if path.is_file())
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    manifest = {
        "format": FORMAT,
        "records": result.records,
        "users": result.users,
        "edges": result.edges,
        "fingerprint": result.fingerprint,
        "key_name": key_name(key),
        "sizes": {path.name: path.stat().st_size for path in files},
        "sha256": {path.name: _file_digest(path) for path in files},
    }
    with (directory / "manifest.json").open("w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_column(path: Path, name: str) -> pa.ChunkedArray:
    with pa.memory_map(str(path), "r") as source:
        return pa.ipc.open_file(source).read_all().column(name)
