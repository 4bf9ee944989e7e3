"""Rows of tokens, which the model is trained on. A row never mixes owners.

Every record is tokenised, ended with the end-of-text token, and cut into rows of at most
`sequence_length` tokens. Samplers count a row as one record, so a long record counts several times.
Rows are cached in the store, one cache for each tokenizer and length. The cache contains digests of
its files, and training refuses a cache that has changed. Chats are written out by the tokenizer's
own chat template.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray

from userdp.data.files import ArrayWriter, file_digest
from userdp.data.store import UserStore
from userdp.durable import OWNER_ONLY_DIRECTORY, OWNER_ONLY_FILE
from userdp.errors import InputError
from userdp.index import IGNORED_LABEL, Rows, UserIndex

ENCODE_BATCH = 2048
DIGESTS = "digests.json"


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """Tokens of row i are `tokens[indptr[i]:indptr[i + 1]]`, all written by user `owners[i]`."""

    tokens: NDArray[np.int32]
    indptr: NDArray[np.int64]
    owners: NDArray[np.int64]
    num_users: int

    def __repr__(self) -> str:
        return "TokenRows(<secret>)"

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def index(self) -> UserIndex:
        """Whose rows are whose."""
        return UserIndex.from_owner_numbers(np.asarray(self.owners), num_users=self.num_users)

    def padded(self, rows: Rows, *, pad_token: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Input ids and labels of the rows, padded on the right. Padding has no label.

        Under causal attention a token does not depend on what follows, so padding on the right
        needs no mask.
        """
        rows = np.asarray(rows, dtype=np.int64)
        starts = self.indptr[rows]
        return padded(self.tokens, starts, self.indptr[rows + 1] - starts, pad_token=pad_token)


def padded(
    tokens: NDArray[np.int32],
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
    store: UserStore, tokenizer: Any, *, sequence_length: int, verify: bool = False
) -> TokenRows:
    """The store's rows under a Hugging Face tokenizer, from the cache if there is one.

    With `verify`, every byte of the cache is checked, so that training uses the named data.
    """
    owners = store.sole_owners()
    tokens, indptr, record_of_row = _cached_rows(store, tokenizer, sequence_length, verify=verify)
    return TokenRows(
        tokens=tokens, indptr=indptr, owners=owners[record_of_row], num_users=store.num_users
    )


def tokenise_with_records(
    store: UserStore, tokenizer: Any, *, sequence_length: int
) -> tuple[TokenRows, NDArray[np.int64]]:
    """The rows of `tokenise`, and which record each is from."""
    _, _, record_of_row = _cached_rows(store, tokenizer, sequence_length)
    return tokenise(store, tokenizer, sequence_length=sequence_length), np.asarray(record_of_row)


def tokenise_by_record(store: UserStore, tokenizer: Any, *, sequence_length: int) -> TokenRows:
    """All rows, each owned by the number of its record: for records of several owners.

    Never for training: a bound on what an "owner" gives would here be one on records.
    """
    tokens, indptr, record_of_row = _cached_rows(store, tokenizer, sequence_length)
    return TokenRows(
        tokens=tokens,
        indptr=indptr,
        owners=np.asarray(record_of_row),
        num_users=store.num_records,
    )


def tokenise_selected(
    store: UserStore,
    tokenizer: Any,
    records: NDArray[np.int64],
    *,
    sequence_length: int,
    owners: NDArray[np.int64] | None = None,
    verify: bool = False,
) -> TokenRows:
    """One row for each entry of `records`: the first tokens of that record.

    The bound of a selection counts records, so a record is one row. `owners` gives the one owner of
    each record of the store, and rows belong to them. Without it, records may have several owners.
    The selection bounded all their contributions, so every row is its own owner: row i has owner i.
    """
    tokens, indptr, record_of_row = _cached_rows(store, tokenizer, sequence_length, verify=verify)
    first_row = np.searchsorted(record_of_row, records)
    # A record without a token to predict has no row. It could only contribute zero.
    has_row = np.append(record_of_row, -1)[first_row] == records
    starts, stops = indptr[first_row[has_row]], indptr[first_row[has_row] + 1]
    lengths = stops - starts
    new_indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    positions = np.arange(new_indptr[-1]) + np.repeat(starts - new_indptr[:-1], lengths)
    return TokenRows(
        tokens=tokens[positions],
        indptr=new_indptr,
        owners=np.arange(len(lengths)) if owners is None else owners[records[has_row]],
        num_users=len(lengths) if owners is None else store.num_users,
    )


def _cached_rows(
    store: UserStore, tokenizer: Any, sequence_length: int, *, verify: bool = False
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """All tokens, where each row begins and ends, and which record each row is from."""
    if sequence_length < 2:
        raise InputError(f"sequence_length={sequence_length}: predicting takes at least 2 tokens.")
    end = tokenizer.eos_token_id
    if end is None:
        raise InputError("the tokenizer has no end-of-text token (eos_token): set one.")
    cache = store.path / "tokens" / _cache_name(store, tokenizer, sequence_length)
    if not cache.is_dir():
        _write_cache(cache, store, tokenizer, end, sequence_length)
    elif verify:
        _verify_cache(cache)
    return (
        np.memmap(cache / "tokens.i32", np.int32, mode="r"),
        np.load(cache / "indptr.npy", mmap_mode="r"),
        np.load(cache / "record_of_row.npy", mmap_mode="r"),
    )


def tokens_per_record(store: UserStore, tokenizer: Any) -> NDArray[np.int64]:
    """How many tokens each record has, its end-of-text token included."""
    lengths: list[int] = []
    for start in range(0, store.num_records, ENCODE_BATCH):
        encoded = _encode(store, tokenizer, start)
        lengths += [len(ids) + 1 for ids in encoded]
    return np.asarray(lengths, np.int64)


def _encode(store: UserStore, tokenizer: Any, start: int) -> list[list[int]]:
    texts: list[str] = store.texts.slice(start, ENCODE_BATCH).to_pylist()
    if store.manifest["text_kind"] == "chat":
        texts = [written_out(json.loads(text), tokenizer) for text in texts]
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)[
        "input_ids"
    ]


def written_out(messages: list[dict[str, str]], tokenizer: Any) -> str:
    """A chat as the tokenizer's template writes it, or as plain text if it has none.

    A template may refuse a chat, for instance one that begins with the wrong role. That chat is
    plain text too: one user's record must not end the run of all.
    """
    if getattr(tokenizer, "chat_template", None):
        try:
            return tokenizer.apply_chat_template(messages, tokenize=False)
        except (jinja2.TemplateError, TypeError, ValueError):
            pass
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _write_cache(
    cache: Path, store: UserStore, tokenizer: Any, end: int, sequence_length: int
) -> None:
    """Write rows batch by batch, so that the tokens of a large store need not fit into memory."""
    partial = cache.with_name(f".{cache.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    # Tokens are the texts in other words.
    cache.parent.mkdir(mode=OWNER_ONLY_DIRECTORY, exist_ok=True)
    partial.mkdir(mode=OWNER_ONLY_DIRECTORY)
    total = 0
    with (
        (partial / "tokens.i32").open("wb") as tokens,
        ArrayWriter(partial / "indptr.npy") as indptr,
        ArrayWriter(partial / "record_of_row.npy") as record_of_row,
    ):
        indptr.write(np.zeros(1, np.int64))
        for start in range(0, store.num_records, ENCODE_BATCH):
            encoded = _encode(store, tokenizer, start)
            ids, lengths, records = _cut(encoded, end, sequence_length)
            tokens.write(ids.data)
            if len(lengths):
                indptr.write(total + np.cumsum(lengths))
                record_of_row.write(start + records)
                total += int(lengths.sum())
    if not total:
        shutil.rmtree(partial)
        raise InputError("no record has a token to predict: the store's texts are empty.")
    (partial / DIGESTS).write_text(json.dumps(_digests(partial)))
    for path in partial.iterdir():
        path.chmod(OWNER_ONLY_FILE)
    os.replace(partial, cache)


def _digests(cache: Path) -> dict[str, str]:
    return {
        path.name: file_digest(path) for path in sorted(cache.iterdir()) if path.name != DIGESTS
    }


def _verify_cache(cache: Path) -> None:
    """Refuse a cache whose files have changed since they were written."""
    try:
        written = json.loads((cache / DIGESTS).read_text())
    except (OSError, ValueError, RecursionError):
        written = None
    if written != _digests(cache):
        raise InputError(
            f"{cache}: this cache of tokens changed since it was written, so what would be trained "
            "on is not the store's text. Delete the directory; it is made again."
        )


def _cut(
    encoded: list[list[int]], end: int, sequence_length: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Rows of the encoded records: their tokens, their lengths, and which record each is from."""
    tokens: list[int] = []
    lengths: list[int] = []
    records: list[int] = []
    for record, ids in enumerate(encoded):
        closed = [*ids, end]
        for begin in range(0, len(closed), sequence_length):
            row = closed[begin : begin + sequence_length]
            # A row of one token predicts nothing.
            if len(row) > 1:
                tokens += row
                lengths.append(len(row))
                records.append(record)
    return (
        np.asarray(tokens, np.int32),
        np.asarray(lengths, np.int64),
        np.asarray(records, np.int64),
    )


def _cache_name(store: UserStore, tokenizer: Any, sequence_length: int) -> str:
    """A name that changes with anything that changes the rows."""
    identity = f"{store.fingerprint}|{sequence_length}|{tokenizer_digest(tokenizer)}"
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def tokenizer_digest(tokenizer: Any) -> str:
    """A digest of all of a tokenizer that changes the rows: rule, chat template, end of text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rule = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab())
    template = getattr(tokenizer, "chat_template", None)
    identity = f"{tokenizer.eos_token_id}|{template}|{rule}"
    return hashlib.sha256(identity.encode()).hexdigest()
