"""The user store: records, users, and the edges between them, memory-mapped from disk.

A store is a directory:

    manifest.json                          counts, fingerprint, file checksums, name of the id key
    records.arrow                          column `text`
    users.arrow                            column `pseudonym`: a keyed hash of each user's id
    record_users_indptr.npy, record_users.npy    owners of record i, numbers by first appearance
    user_records_indptr.npy, user_records.npy    records of user i
    times.npy                              when each record was written, if the source says so
    history.json                           cautions, the splits that this store is a part of, and
                                           the population that it shares with the store before it

Everything in it is private except the fingerprint, which names the data in the ledgers of runs. The
fingerprint covers texts and edges, not the pseudonyms. It is keyed, so nobody can test a guess at a
record against it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from userdp.data import remote
from userdp.data.array_files import array_digest, file_digest
from userdp.data.contents import TEXT_KINDS, TextKind
from userdp.data.files import TextDigest, fingerprint, keyed_digest, pc, read_column
from userdp.data.identity import IdRule, Pseudonyms, forget_key, key_beside, load_or_create_key
from userdp.data.write import (
    FINGERPRINTED,
    FORMAT,
    HISTORY,
    ImportResult,
    history_digest,
    write_batches,
    write_store,
)
from userdp.errors import InputError
from userdp.index import indptr_of, ranges

__all__ = ["FORMAT", "ImportResult", "UserStore", "write_batches", "write_store"]


# What a manifest holds beside its format, and the type of each.
_KINDS = {
    "records": int,
    "users": int,
    "edges": int,
    "fingerprint": str,
    "fingerprint_key": str,
    "key_name": str,
    "text_kind": str,
    "sizes": dict,
    "sha256": dict,
}


def _check_kinds(manifest: dict[str, Any]) -> None:
    """Raise `ValueError` if a manifest lacks something, or names files that no store has."""
    if any(type(manifest[name]) is not kind for name, kind in _KINDS.items()):
        raise ValueError("a value is of another kind")
    bytes.fromhex(manifest["fingerprint_key"])
    if manifest["text_kind"] not in TEXT_KINDS:
        raise ValueError("records are of another kind")
    # A file without a checksum could be changed unseen.
    if set(manifest["sha256"]) != set(manifest["sizes"]) - FINGERPRINTED:
        raise ValueError("checksums are missing")


@dataclass(frozen=True, kw_only=True)
class UserStore:
    """An opened store. Arrays are memory-mapped, so opening reads almost nothing."""

    path: Path
    manifest: dict[str, Any]
    texts: pa.ChunkedArray
    pseudonyms: pa.ChunkedArray
    record_users_indptr: NDArray[np.int64]
    record_users: NDArray[np.int64]
    user_records_indptr: NDArray[np.int64]
    user_records: NDArray[np.int64]
    times: NDArray[np.int64] | None
    url: str | None = None

    def __repr__(self) -> str:
        return f"UserStore({str(self.path)!r})"

    @property
    def num_records(self) -> int:
        """The number of records. Secret."""
        return len(self.record_users_indptr) - 1

    @property
    def num_users(self) -> int:
        """The number of users. Secret."""
        return len(self.user_records_indptr) - 1

    @property
    def text_kind(self) -> TextKind:
        """What the text of every record holds."""
        return self.manifest["text_kind"]

    @property
    def fingerprint(self) -> str:
        """Names the texts and edges; a run is bound to it. It is keyed, and so it may be public."""
        return self.manifest["fingerprint"]

    @property
    def fingerprint_key(self) -> bytes:
        """The key of the fingerprint. Secret."""
        return bytes.fromhex(self.manifest["fingerprint_key"])

    def keyed_digest(self, content: bytes) -> str:
        """A public name for something private about this store, such as a selection."""
        return keyed_digest(content, key=self.fingerprint_key)

    @cached_property
    def chunk_starts(self) -> NDArray[np.int64]:
        """The first record of every chunk of texts, and the number of records."""
        return np.cumsum([0, *(len(chunk) for chunk in self.texts.chunks)])

    @staticmethod
    def open(path: str | Path, *, home: str | Path | None = None) -> UserStore:
        """Open a store, and check that its files have the sizes in the manifest.

        A store in object storage is opened by its URL the first time, with a `home` for it on this
        machine (`remote`); later by its home. Its files are read there when they are needed.
        """
        if remote.is_url(path):
            if home is None:
                raise InputError(
                    f"{path}: give a home, a directory on this machine for the store's small files "
                    "and, beside it, its budget: UserStore.open(url, home=...)."
                )
            remote.make_home(str(path), Path(home))
            path = home
        path = Path(path)
        manifest_path = path / "manifest.json"
        if not manifest_path.is_file():
            raise InputError(f"{path} is not a user store: it has no manifest.json.")
        try:
            manifest: dict[str, Any] = json.loads(manifest_path.read_text())
        except (ValueError, RecursionError):
            raise InputError(f"{manifest_path}: damaged; import the data again.") from None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:  # pyright: ignore
            raise InputError(
                f"{path}: written in a format this version does not read; import the data again."
            )
        try:
            return UserStore._opened(path, manifest)
        except InputError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, OSError, pa.ArrowException):
            # What the readers say may quote the data.
            raise InputError(f"{path}: damaged; import the data again.") from None

    @staticmethod
    def from_dataset(
        data: Any,
        out: str | Path | None = None,
        *,
        user: str = "user_id",
        text: str = "text",
        completion: str | None = None,
        label: str | None = None,
        time: str | None = None,
        key: str | Path | None = None,
        ids: IdRule | str = IdRule.REFUSE,
    ) -> UserStore:
        """Import data that is loaded already, and open the store.

        `data` is a `datasets.Dataset`, also one that is streamed, a pandas DataFrame, a pyarrow
        Table or a list of dicts. `user`, `text` and `time` name its columns; a column of chat
        messages is kept as chats. With `completion`, texts are the prompts that it completes; with
        `label`, each text has a class. The pseudonym key is made in `secret/` beside `out`, or is
        `key`: stores under one key can be compared user by user. `ids` says what ids that differ
        only in case, width or white space mean: "refuse", "merge" or "exact".

        Without `out` the store lies in a temporary folder, readable by its owner only, and goes
        with the object or the process. What is spent on its people is forgotten with it: give `out`
        wherever more than one run may use these people.
        """
        from userdp.data.importers.columns import Columns
        from userdp.data.importers.loaded import loaded_batches

        columns = Columns(user=user, text=text, time=time, completion=completion, label=label)
        # mkdtemp gives a folder that nobody else can look into.
        temporary = Path(tempfile.mkdtemp(prefix="userdp-")) if out is None else None
        place = Path(out or "") if temporary is None else temporary / "store"
        key_path = Path(key) if key is not None else key_beside(place)
        is_new = not key_path.exists()
        try:
            write_batches(
                loaded_batches(data, columns),
                place,
                pseudonyms=Pseudonyms.under(load_or_create_key(key_path)),
                id_rule=IdRule(ids),
            )
        except BaseException:
            if is_new:
                forget_key(key_path, is_own_folder=key is None)
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        store = UserStore.open(place)
        if temporary is not None:
            weakref.finalize(store, shutil.rmtree, temporary, ignore_errors=True)
        return store

    @staticmethod
    def _opened(path: Path, manifest: dict[str, Any]) -> UserStore:
        _check_kinds(manifest)
        url = remote.url_of(path)
        for name, size in manifest["sizes"].items():
            if remote.size_of(path, url, name) != size:
                raise InputError(f"{path / name}: missing or changed since the import.")

        def array(name: str) -> Any:
            if url is not None:
                return remote.RemoteArray.of_npy(remote.RemoteFile(f"{url}/{name}"))
            return np.load(path / name, mmap_mode="r")

        def column(name: str, reads: str) -> Any:
            if url is None:
                return read_column(path / name, reads)

            def read(file: Path) -> pa.ChunkedArray:
                found = read_column(file, reads)
                if reads == "text":
                    store._check_fingerprint(found)
                return found

            return remote.LazyColumn(path, url, name, read)

        store = UserStore(
            path=path,
            manifest=manifest,
            url=url,
            texts=column("records.arrow", "text"),
            pseudonyms=column("users.arrow", "pseudonym"),
            record_users_indptr=array("record_users_indptr.npy"),
            record_users=array("record_users.npy"),
            user_records_indptr=array("user_records_indptr.npy"),
            user_records=array("user_records.npy"),
            times=array("times.npy") if "times.npy" in manifest["sizes"] else None,
        )
        return store

    def verify(self) -> None:
        """Read every file, and refuse the store if one has changed since the import.

        The texts of a store in object storage are checked when they are read. Its owners are
        checked here without them, by the copy of the edges in the users' order.
        """
        self._check_history()
        for name, digest in self.manifest["sha256"].items():
            file = remote.fetched(self.path, self.url, name) if self.url else self.path / name
            if file_digest(file) != digest:
                raise InputError(f"{self.path / name}: changed since the import.")
        if self.url is None:
            self._check_fingerprint(self.texts)
        elif not remote.sides_agree(self.path, self.record_users_indptr, self.record_users):
            raise InputError(f"{self.path}: owners changed since the import.")

    def _check_fingerprint(self, texts: pa.ChunkedArray) -> None:
        digest = TextDigest()
        for chunk in texts.chunks:
            digest.update(chunk)
        edges = array_digest(self.record_users_indptr), array_digest(self.record_users)
        if fingerprint(digest.digest(), *edges, key=self.fingerprint_key) != self.fingerprint:
            raise InputError(f"{self.path}: texts or owners changed since the import.")

    def text(self, record: int) -> str:
        """The text of one record."""
        return self.texts[record].as_py()

    def texts_of(self, records: NDArray[np.int64]) -> list[str]:
        """The texts of many records in the given order, read in one pass over the file."""
        records = np.asarray(records)
        in_file_order = np.argsort(records, kind="stable")
        wanted = records[in_file_order]
        bounds = np.searchsorted(wanted, self.chunk_starts)
        pieces: list[pa.Array] = []
        for chunk, (begin, end) in enumerate(pairwise(bounds.tolist())):
            if begin < end:
                within = pa.array(wanted[begin:end] - self.chunk_starts[chunk])
                pieces.append(self.texts.chunk(chunk).take(within))
        found: list[str] = [text for piece in pieces for text in piece.to_pylist()]
        if len(found) != len(records):
            raise IndexError(f"a record number is not in 0..{self.num_records - 1}.")
        result = [""] * len(found)
        for position, text in zip(in_file_order.tolist(), found, strict=True):
            result[position] = text
        return result

    def records_of(self, user: int) -> NDArray[np.int64]:
        """The records of one user."""
        return self.user_records[
            self.user_records_indptr[user] : self.user_records_indptr[user + 1]
        ]

    def records_of_users(
        self, users: NDArray[np.int64], *, at_most: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The records of many users: those of `users[i]` are `records[indptr[i]:indptr[i + 1]]`.

        Returns (indptr, records). `at_most` keeps only the first records of each user.
        """
        users = np.asarray(users)
        starts = self.user_records_indptr[users]
        counts = self.user_records_indptr[users + 1] - starts
        if at_most is not None:
            counts = np.minimum(counts, at_most)
        indptr = indptr_of(counts)
        return indptr, np.asarray(self.user_records[ranges(starts, counts)])

    def records_per_user(self) -> NDArray[np.int64]:
        """How many records each user has."""
        return np.diff(self.user_records_indptr)

    def users_per_record(self) -> NDArray[np.int64]:
        """How many owners each record has."""
        return np.diff(self.record_users_indptr)

    def bytes_per_record(self) -> NDArray[np.int64]:
        """The length of each text in UTF-8."""
        return np.concatenate([np.asarray(pc.binary_length(chunk)) for chunk in self.texts.chunks])

    def sole_owners(self) -> NDArray[np.int64]:
        """The owner of each record, if every record has exactly one.

        Otherwise it raises `InputError`: charging a record to one of several owners would leave the
        others unprotected.
        """
        shared = int((self.users_per_record() > 1).sum())
        if shared:
            raise InputError(
                f"{self.path}: {shared:,} of {self.num_records:,} records have several owners, and "
                "charging them to one leaves the others unprotected. Bound contributions first "
                "(`userdp bound`, [data] selection), or import with --owners first if that is true."
            )
        return np.asarray(self.record_users)

    def shares_users_with(self, other: UserStore) -> int | None:
        """How many users are in both stores; None if that is not known.

        It is unknown if ids are hidden under different keys, or were compared by different rules.
        """
        if self.manifest["key_name"] != other.manifest["key_name"]:
            return None
        ours = set(self.pseudonyms.to_pylist())
        return len(ours.intersection(other.pseudonyms.to_pylist()))

    @property
    def cautions(self) -> tuple[str, ...]:
        """What was done to these records that no guarantee covers. Statements must repeat it."""
        return tuple(self._history().get("cautions", ()))

    @property
    def user_splits(self) -> tuple[str, ...]:
        """The splits by user that this store is a part of, oldest first. Public numbers only."""
        return tuple(self._history().get("user_splits", ()))

    @property
    def population(self) -> dict[str, str] | None:
        """The `id` of the population of the store that this one was made of, and its `path`.

        None if this store was imported. The path is relative to the store.
        """
        return self._history().get("population")

    def _history(self) -> dict[str, Any]:
        self._check_history()
        path = self.path / HISTORY
        return json.loads(path.read_text()) if path.is_file() else {}

    def _check_history(self) -> None:
        found = history_digest(self.path, self.fingerprint, self.fingerprint_key)
        if self.manifest.get("history") != found:
            raise InputError(
                f"{self.path / HISTORY}: changed since the import, or taken away with the cautions "
                "in it; or an older version wrote the store. Import the data again."
            )
