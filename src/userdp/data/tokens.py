"""Rows of tokens: what the model is trained on. A row never mixes records, so it never mixes owners.

Every record is tokenised, closed with the end-of-text token, and cut into rows of at most
`sequence_length` tokens. A row is what the samplers count as one record: a long record is several.
Rows are cached beside the store, one cache per tokenizer and length.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from userdp.data.store import UserStore
from userdp.errors import InputError
from userdp.index import Rows, UserIndex

IGNORED_LABEL = -100
ENCODE_BATCH = 2048


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
        """Input ids and labels of the rows, padded on the right; padding has no label.

        Under causal attention what follows a token cannot change it, so padding on the right needs no
        mask.
        """
        lengths = self.indptr[rows + 1] - self.indptr[rows]
        shape = (len(rows), int(lengths.max(initial=1)))
        input_ids = np.full(shape, pad_token, dtype=np.int64)
        labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
        for line, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            input_ids[line, :length] = self.tokens[self.indptr[row] : self.indptr[row] + length]
            labels[line, :length] = input_ids[line, :length]
        return input_ids, labels


def tokenise(store: UserStore, tokenizer: Any, *, sequence_length: int) -> TokenRows:
    """The store's rows under a Hugging Face tokenizer, from the cache if they are there."""
    if sequence_length < 2:
        raise InputError(f"sequence_length={sequence_length}: predicting takes at least 2 tokens.")
    end = tokenizer.eos_token_id
    if end is None:
        raise InputError("the tokenizer has no end-of-text token (eos_token): set one.")
    owners = store.sole_owners()
    cache = store.path / "tokens" / _cache_name(store, tokenizer, sequence_length)
    if not cache.is_dir():
        _write_cache(cache, *_encode(store, tokenizer, end, sequence_length))
    record_of_row = np.load(cache / "record_of_row.npy", mmap_mode="r")
    return TokenRows(
        tokens=np.load(cache / "tokens.npy", mmap_mode="r"),
        indptr=np.load(cache / "indptr.npy", mmap_mode="r"),
        owners=owners[record_of_row],
        num_users=store.num_users,
    )


def _encode(
    store: UserStore, tokenizer: Any, end: int, sequence_length: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    tokens: list[NDArray[np.int32]] = []
    lengths: list[int] = []
    record_of_row: list[int] = []
    for start in range(0, store.num_records, ENCODE_BATCH):
        texts: list[str] = store.texts.slice(start, ENCODE_BATCH).to_pylist()
        encoded: list[list[int]] = tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        for offset, ids in enumerate(encoded):
            row_tokens = np.asarray([*ids, end], dtype=np.int32)
            for begin in range(0, len(row_tokens), sequence_length):
                row = row_tokens[begin : begin + sequence_length]
                # A row of one token predicts nothing.
                if len(row) > 1:
                    tokens.append(row)
                    lengths.append(len(row))
                    record_of_row.append(start + offset)
    if not lengths:
        raise InputError("no record has a token to predict: the store's texts are empty.")
    return (
        np.concatenate(tokens),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        np.asarray(record_of_row, dtype=np.int64),
    )


def _write_cache(
    cache: Path,
    tokens: NDArray[np.int32],
    indptr: NDArray[np.int64],
    record_of_row: NDArray[np.int64],
) -> None:
    partial = cache.with_name(f".{cache.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    np.save(partial / "tokens.npy", tokens)
    np.save(partial / "indptr.npy", indptr)
    np.save(partial / "record_of_row.npy", record_of_row)
    os.replace(partial, cache)


def _cache_name(store: UserStore, tokenizer: Any, sequence_length: int) -> str:
    """Changes with anything that changes the rows."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rule = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab())
    identity = f"{store.fingerprint}|{sequence_length}|{tokenizer.eos_token_id}|{rule}"
    return hashlib.sha256(identity.encode()).hexdigest()[:32]
