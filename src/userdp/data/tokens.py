"""Rows of tokens, which the model is trained on. A row never mixes owners.

Every record becomes rows of at most `sequence_length` tokens, as the task's encoding says. By
default that is the text, ended with the end-of-text token, and cut. Samplers count a row as one
record, so a long record counts several times. Rows are cached in the store, one cache for each
tokenizer, length and encoding. The cache contains digests of its files, and training refuses a
cache that has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from userdp.data import encoding as reading
from userdp.data.array_files import ArrayWriter, file_digest
from userdp.data.contents import pair_of, refuse_unwritten
from userdp.data.encoding import WHOLE_TEXT, Encoding, begins_texts, ids_of, refuse_unknown_words
from userdp.data.remote_tokens import DIGESTS, LARGE, adopt, numbers, write_blocks
from userdp.errors import InputError
from userdp.files.durable import OWNER_ONLY_DIRECTORY, OWNER_ONLY_FILE
from userdp.index import IGNORED_LABEL, Rows, UserIndex, indptr_of, ranges

if TYPE_CHECKING:
    from userdp.data.store import UserStore

ENCODE_BATCH = 2048


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """Tokens of row i are `tokens[indptr[i]:indptr[i + 1]]`, all written by user `owners[i]`.

    `labelled` says of each token whether it carries loss; None means that all do. `classes` gives
    the class of each row, where rows are classified.
    `records[i]` is the number of the record that row i is from, where that is known.
    """

    tokens: NDArray[np.int32]
    indptr: NDArray[np.int64]
    owners: NDArray[np.int64]
    num_users: int
    labelled: NDArray[np.bool_] | None = None
    classes: NDArray[np.int64] | None = None
    records: NDArray[np.int64] | None = None

    def __repr__(self) -> str:
        return "TokenRows(<secret>)"

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def index(self) -> UserIndex:
        """Whose rows are whose."""
        return UserIndex.from_owner_numbers(np.asarray(self.owners), num_users=self.num_users)

    def read(self, group: Rows, rng: np.random.Generator) -> tuple[TokenRows, Rows]:
        """What a group of rows reads when it is drawn (`choose.Contributions`): its rows."""
        return self, group

    def padded(self, rows: Rows, *, pad_token: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Input ids and labels of the rows, padded on the right.

        Neither padding nor a token that carries no loss has a label.
        Under causal attention a token does not depend on what follows, so padding on the right
        needs no mask.
        """
        rows = np.asarray(rows, dtype=np.int64)
        starts = self.indptr[rows]
        lengths = self.indptr[rows + 1] - starts
        input_ids, labels = padded(self.tokens, starts, lengths, pad_token=pad_token)
        if self.labelled is not None:
            carries_loss, _ = padded(self.labelled, starts, lengths, pad_token=0)
            labels = np.where(carries_loss, labels, IGNORED_LABEL)
        return input_ids, labels


def padded(
    tokens: NDArray[np.int32] | NDArray[np.bool_],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    *,
    pad_token: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Input ids and labels of the spans `tokens[start:start + length]`, padded on the right.

    >>> ids, labels = padded(np.arange(9), np.array([2, 7]), np.array([3, 1]), pad_token=0)
    >>> ids.tolist(), labels.tolist()
    ([[2, 3, 4], [7, 0, 0]], [[2, 3, 4], [7, -100, -100]])
    """
    width = int(lengths.max(initial=1))
    columns = np.arange(width)
    is_token = columns < lengths[:, None]
    # Positions after a span's end are read and then hidden, so any position in the file will do.
    positions = np.minimum(starts[:, None] + columns, max(0, len(tokens) - 1))
    found = tokens[positions]
    return (
        np.where(is_token, found, pad_token).astype(np.int64),
        np.where(is_token, found, IGNORED_LABEL).astype(np.int64),
    )


def tokenise(
    store: UserStore,
    tokenizer: Any,
    *,
    sequence_length: int,
    encoding: Encoding = WHOLE_TEXT,
    verify: bool = False,
) -> TokenRows:
    """The store's rows under a Hugging Face tokenizer, from the cache if there is one.

    With `verify`, every byte of the cache is checked, so that training uses the named data.
    """
    owners = store.sole_owners()
    found = tokenise_by_record(
        store, tokenizer, sequence_length=sequence_length, encoding=encoding, verify=verify
    )
    return replace(found, owners=owners[found.owners], num_users=store.num_users)


def tokenise_by_record(
    store: UserStore,
    tokenizer: Any,
    *,
    sequence_length: int,
    encoding: Encoding = WHOLE_TEXT,
    verify: bool = False,
) -> TokenRows:
    """All rows, each owned by the number of its record: for records of several owners.

    Never for training: a bound on what an "owner" gives would here be one on records.
    """
    cache = _cache_of(store, tokenizer, sequence_length, encoding, verify=verify)
    where = store.path, store.url
    record_of_row = np.load(cache / "record_of_row.npy", mmap_mode="r")
    return TokenRows(
        tokens=numbers(cache, "tokens.i32", *where),
        indptr=np.load(cache / "indptr.npy", mmap_mode="r"),
        owners=np.asarray(record_of_row),
        num_users=store.num_records,
        labelled=numbers(cache, "labelled.u8", *where) if encoding.has_labelled else None,
        classes=np.load(cache / "classes.npy", mmap_mode="r") if encoding.has_classes else None,
        records=record_of_row,
    )


def tokenise_selected(
    store: UserStore,
    tokenizer: Any,
    records: NDArray[np.int64],
    *,
    sequence_length: int,
    encoding: Encoding = WHOLE_TEXT,
    owners: NDArray[np.int64] | None = None,
    verify: bool = False,
) -> TokenRows:
    """The rows of each entry of `records`.

    `owners` gives the one owner of each record of the store. Then a record gives all its rows, and
    they belong to that owner: the sampler counts a user's rows, whatever was selected.

    Without it, records may have several owners, and a record gives its first row only, because the
    bound of the selection counts records. Every row is its own owner: row i has owner i.
    """
    found = tokenise_by_record(
        store, tokenizer, sequence_length=sequence_length, encoding=encoding, verify=verify
    )
    first_row = np.searchsorted(found.owners, records)
    # A record without a token to predict has no row. It could only contribute zero.
    count = np.searchsorted(found.owners, records, side="right") - first_row
    if owners is None:
        count = np.minimum(count, 1)
    chosen = ranges(first_row, count)
    starts, stops = found.indptr[chosen], found.indptr[chosen + 1]
    lengths = stops - starts
    positions = ranges(starts, lengths)
    return TokenRows(
        tokens=found.tokens[positions],
        indptr=indptr_of(lengths),
        owners=np.arange(len(lengths)) if owners is None else owners[found.owners[chosen]],
        num_users=len(lengths) if owners is None else store.num_users,
        labelled=None if found.labelled is None else found.labelled[positions],
        classes=None if found.classes is None else found.classes[chosen],
        records=found.owners[chosen],
    )


def rows_digest(
    store: UserStore, tokenizer: Any, *, sequence_length: int, encoding: Encoding = WHOLE_TEXT
) -> str:
    """A public name of the rows as they are now.

    Neither the store nor the tokenizer names them: a chat template that uses the date gives other
    rows once the cache is made again.
    """
    cache = _cache_of(store, tokenizer, sequence_length, encoding, verify=False)
    return store.keyed_digest(b"rows of tokens\n" + (cache / DIGESTS).read_bytes())


def _cache_of(
    store: UserStore, tokenizer: Any, sequence_length: int, encoding: Encoding, *, verify: bool
) -> Path:
    _refuse_unwritten(store, tokenizer)
    cache = store.path / "tokens" / _cache_name(store, tokenizer, sequence_length, encoding)
    if not cache.is_dir():
        refuse_unknown_words(tokenizer)
    encoding.check(store.text_kind, tokenizer, sequence_length)
    if not cache.is_dir() and store.url is not None:
        adopt(cache, store.path, store.url)
    if not cache.is_dir():
        _write_cache(cache, store, tokenizer, sequence_length, encoding)
    elif verify:
        _verify_cache(cache, is_remote=store.url is not None)
    return cache


def tokens_per_record(store: UserStore, tokenizer: Any) -> NDArray[np.int64]:
    """How many tokens each record has, with those that begin and end a text; 0 if it has none."""
    _refuse_unwritten(store, tokenizer)
    refuse_unknown_words(tokenizer)
    around = 2 if begins_texts(tokenizer) else 1
    lengths: list[int] = []
    for start in range(0, store.num_records, ENCODE_BATCH):
        found = ids_of(_texts(store, start), store.text_kind, tokenizer)
        lengths += [len(ids) + around if ids else 0 for ids in found]
    return np.asarray(lengths, np.int64)


def holds_chats(store: UserStore) -> bool:
    """Whether a template must write the store's records: chats, or prompts that are chats."""
    if store.text_kind != "pair" or not store.num_records:
        return store.text_kind == "chat"
    # The first record tells the form, which follows from the columns that were imported.
    return not isinstance(pair_of(store.text(0))[0], str)


def _refuse_unwritten(store: UserStore, tokenizer: Any) -> None:
    if holds_chats(store):
        refuse_unwritten("chat", tokenizer)


def _texts(store: UserStore, start: int) -> list[str]:
    return store.texts.slice(start, ENCODE_BATCH).to_pylist()


def _write_cache(
    cache: Path, store: UserStore, tokenizer: Any, sequence_length: int, encoding: Encoding
) -> None:
    """Write rows batch by batch, so that the tokens of a large store need not fit into memory."""
    before = reading.copied(tokenizer)
    partial = cache.with_name(f".{cache.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    # Tokens are the texts in other words.
    cache.parent.mkdir(mode=OWNER_ONLY_DIRECTORY, exist_ok=True)
    partial.mkdir(mode=OWNER_ONLY_DIRECTORY)
    total = 0
    kind = store.text_kind
    with (
        (partial / "tokens.i32").open("wb") as tokens,
        (partial / "labelled.u8").open("wb") as labelled,
        ArrayWriter(partial / "indptr.npy") as indptr,
        ArrayWriter(partial / "record_of_row.npy") as record_of_row,
        ArrayWriter(partial / "classes.npy") as classes,
    ):
        indptr.write(np.zeros(1, np.int64))
        for start in range(0, store.num_records, ENCODE_BATCH):
            rows = encoding.encode(_texts(store, start), kind, tokenizer, sequence_length)
            if len(rows.lengths):
                tokens.write(rows.tokens.data)
                labelled.write(rows.labelled.data)
                indptr.write(total + np.cumsum(rows.lengths))
                record_of_row.write(start + rows.records)
                classes.write(rows.classes)
                total += int(rows.lengths.sum())
    if not total or reading.learns(tokenizer, before):
        shutil.rmtree(partial)
        raise InputError(reading.LEARNS if total else reading.NOTHING.format(encoding.name))
    for name, is_used in (
        ("labelled.u8", encoding.has_labelled),
        ("classes.npy", encoding.has_classes),
    ):
        if not is_used:
            (partial / name).unlink()
    write_blocks(partial)
    (partial / DIGESTS).write_text(json.dumps(_digests(partial)))
    for path in partial.iterdir():
        path.chmod(OWNER_ONLY_FILE)
    try:
        os.replace(partial, cache)
    except OSError:
        # Another process was faster, and wrote the same rows.
        shutil.rmtree(partial)
        if not cache.is_dir():
            raise


def _digests(cache: Path) -> dict[str, str]:
    return {
        path.name: file_digest(path) for path in sorted(cache.iterdir()) if path.name != DIGESTS
    }


def _verify_cache(cache: Path, *, is_remote: bool) -> None:
    """Refuse a cache whose files have changed since they were written."""
    try:
        written = json.loads((cache / DIGESTS).read_text())
    except (OSError, ValueError, RecursionError):
        written = None
    found = _digests(cache)
    if is_remote and written is not None:
        # Large files that are not here are in object storage. Their blocks are checked when read.
        found = {name: digest for name, digest in written.items() if name in LARGE} | found
    if written != found:
        raise InputError(
            f"{cache}: this cache of tokens changed since it was written, so what would be trained "
            "on is not the store's text. Delete the directory; it is made again."
        )


def _cache_name(store: UserStore, tokenizer: Any, sequence_length: int, encoding: Encoding) -> str:
    """A name that changes with anything that changes the rows."""
    identity = f"{store.fingerprint}|{sequence_length}|{tokenizer_digest(tokenizer)}"
    identity += f"|{encoding.name}" if encoding.name else ""
    # Earlier versions wrote out chats that have no row now.
    identity += "|templated" if store.text_kind == "chat" and not encoding.has_labelled else ""
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def tokenizer_digest(tokenizer: Any) -> str:
    """A digest of all of a tokenizer that changes rows: rule, template, begin and end of text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and (backend.truncation or backend.padding):
        # Every call takes both off, so they change no row, and must not change the digest.
        backend = type(backend).from_str(backend.to_str())
        backend.no_truncation()
        backend.no_padding()
    rule = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab())
    template = getattr(tokenizer, "chat_template", None)
    identity = f"{tokenizer.eos_token_id}|{template}|{rule}"
    identity += f"|{tokenizer.bos_token_id}" if begins_texts(tokenizer) else ""
    # Not in the rule: whether the name of a special token in a text is that token, or a word.
    identity += "|split" if getattr(tokenizer, "split_special_tokens", False) else ""
    return hashlib.sha256(identity.encode()).hexdigest()
