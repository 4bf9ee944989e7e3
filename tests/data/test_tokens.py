from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from importing import KEY

from userdp.data.identity import Pseudonyms
from userdp.data.record import Record, batches_of
from userdp.data.select import random_chunks
from userdp.data.store import UserStore, write_batches, write_store
from userdp.data.tokens import IGNORED_LABEL, TokenRows, tokenise, tokens_per_record, written_out
from userdp.errors import InputError


class Letters:
    """A tokenizer of single letters; 0 ends a text."""

    eos_token_id = 0
    chat_template: str | None = None

    def __init__(self, shift: int = 0) -> None:
        self._shift = shift

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(letter) + self._shift for letter in text] for text in texts]}

    def get_vocab(self) -> dict[str, int]:
        return {"a": ord("a") + self._shift}


def store_of(tmp_path: Path, items: list[tuple[str, str]]) -> UserStore:
    write_store([Record(text, (user,), "1") for text, user in items], tmp_path / "s", key=KEY)
    return UserStore.open(tmp_path / "s")


ITEMS = [("abcdefg", "ann"), ("xy", "bob"), ("hijk", "ann"), ("z", "cy")]


def test_rows_are_chunks_of_single_records_and_know_their_owner(tmp_path: Path) -> None:
    rows = tokenise(store_of(tmp_path, ITEMS), Letters(), sequence_length=4)
    written = [
        (
            "".join(chr(token) if token else "." for token in rows.tokens[begin:end]),
            int(rows.owners[i]),
        )
        for i, (begin, end) in enumerate(zip(rows.indptr[:-1], rows.indptr[1:], strict=True))
    ]
    # "hijk." would leave a row of the end token alone, which predicts nothing.
    assert written == [("abcd", 0), ("efg.", 0), ("xy.", 1), ("hijk", 0), ("z.", 2)]
    assert rows.index().rows_of(0).tolist() == [0, 1, 3]


def test_cache_is_rebuilt_when_tokenizer_or_length_changes(tmp_path: Path) -> None:
    store = store_of(tmp_path, ITEMS)
    first = tokenise(store, Letters(), sequence_length=4)
    again = tokenise(store, Letters(), sequence_length=4)
    assert np.array_equal(first.tokens, again.tokens)
    assert len(list((store.path / "tokens").iterdir())) == 1
    shifted = tokenise(store, Letters(shift=1), sequence_length=4)
    assert shifted.tokens[0] == first.tokens[0] + 1
    tokenise(store, Letters(), sequence_length=5)
    assert len(list((store.path / "tokens").iterdir())) == 3


def test_padded_equals_a_plain_loop(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 9, size=50)
    rows = TokenRows(
        tokens=rng.integers(0, 99, size=lengths.sum()).astype(np.int32),
        indptr=np.concatenate([[0], np.cumsum(lengths)]),
        owners=np.zeros(50, np.int64),
        num_users=1,
    )
    wanted = rng.integers(0, 50, size=20)
    ids, labels = rows.padded(wanted, pad_token=7)
    for line, row in enumerate(wanted):
        tokens = rows.tokens[rows.indptr[row] : rows.indptr[row + 1]].tolist()
        padding = ids.shape[1] - len(tokens)
        assert ids[line].tolist() == tokens + [7] * padding
        assert labels[line].tolist() == tokens + [IGNORED_LABEL] * padding
    assert ids.shape[1] == lengths[wanted].max()
    empty_ids, _ = rows.padded(np.zeros(0, np.int64), pad_token=7)
    assert empty_ids.shape == (0, 1)


def test_random_chunks_cross_records_of_one_user_and_never_users(tmp_path: Path) -> None:
    rows = tokenise(store_of(tmp_path, ITEMS), Letters(), sequence_length=16)
    ids, labels = random_chunks(
        rows,
        rows.index(),
        np.array([0, 2]),
        chunks_per_user=200,
        sequence_length=4,
        rng=np.random.default_rng(1),
        pad_token=99,
    )
    document = "abcdefg.hijk."
    chunks = {"".join(chr(t) if t else "." for t in line) for line in ids[:200]}
    # All ten beginnings are seen: missing one of them has probability below 10 * 0.9^200 < 1e-8.
    assert chunks == {document[i : i + 4] for i in range(10)}
    assert "fg.h" in chunks
    short = ids[200:].tolist()
    assert short == [[ord("z"), 0, 99, 99]] * 200
    assert (labels[200:, 2:] == IGNORED_LABEL).all()


def test_records_of_several_owners_are_refused(tmp_path: Path) -> None:
    write_store([Record("ab", ("ann", "bob"), "1")], tmp_path / "s", key=KEY)
    with pytest.raises(InputError, match="several owners"):
        tokenise(UserStore.open(tmp_path / "s"), Letters(), sequence_length=4)


def test_chats_are_written_by_the_tokenizers_template_or_plainly(tmp_path: Path) -> None:
    chat = '[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]'
    batches = batches_of([Record(chat, ("ann",), "1")], is_chat=True)
    write_batches(batches, tmp_path / "s", pseudonyms=Pseudonyms.under(KEY))
    store = UserStore.open(tmp_path / "s")
    plain = "user: hi\n\nassistant: yes"
    assert tokens_per_record(store, Letters()).tolist() == [len(plain) + 1]

    class Templated(Letters):
        chat_template = "some template"

        def apply_chat_template(self, messages: list[dict[str, str]], *, tokenize: bool) -> str:
            assert not tokenize
            return "|".join(message["content"] for message in messages)

    assert written_out([{"role": "user", "content": "hi"}], Templated()) == "hi"
    assert tokens_per_record(store, Templated()).tolist() == [len("hi|yes") + 1]
