"""Token rows: never two records in one, nothing lost, rebuilt when the tokenizer changes."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from importing import KEY
from letters import ITEMS, Letters, store_of

import models_zoo
from userdp.data.contents import said_in
from userdp.data.identity import Pseudonyms
from userdp.data.record import Record, batches_of
from userdp.data.store import UserStore, write_batches, write_store
from userdp.data.tokens import (
    TokenRows,
    tokenise,
    tokenise_selected,
    tokens_per_record,
)
from userdp.errors import InputError
from userdp.index import IGNORED_LABEL

MakeStore = Callable[[list[Record]], UserStore]

RECORDS = [
    Record("w1 w2 w3", ("a",), "1"),
    Record(" ".join(["w4"] * 9), ("b",), "2"),
    Record("w5", ("a",), "3"),
    Record("w6 w7 w8 w9 w10", ("c",), "4"),
]


def row_lists(rows: TokenRows) -> list[list[int]]:
    return [rows.tokens[a:b].tolist() for a, b in pairwise(rows.indptr)]


def test_rows_never_mix_records_and_lose_no_token(make_store: MakeStore) -> None:
    tokenizer = models_zoo.word_tokenizer()
    rows = tokenise(make_store(RECORDS), tokenizer, sequence_length=4)
    # Word wN is token N + 1; 0 ends every record. The last row of b, a lone end, predicts nothing.
    assert row_lists(rows) == [
        [2, 3, 4, 0],
        [5, 5, 5, 5],
        [5, 5, 5, 5],
        [5, 0],
        [6, 0],
        [7, 8, 9, 10],
        [11, 0],
    ]
    assert rows.owners.tolist() == [0, 1, 1, 1, 0, 2, 2]
    index = rows.index()
    assert [index.rows_of(user).tolist() for user in range(3)] == [[0, 4], [1, 2, 3], [5, 6]]


def test_row_of_a_single_token_is_left_out(make_store: MakeStore) -> None:
    store = make_store([Record("w1 w2 w3 w4", ("a",), "1"), Record("w5", ("b",), "2")])
    rows = tokenise(store, models_zoo.word_tokenizer(), sequence_length=4)
    assert row_lists(rows) == [[2, 3, 4, 5], [6, 0]]


def test_padding_stands_on_the_right_and_has_no_label(make_store: MakeStore) -> None:
    rows = tokenise(make_store(RECORDS), models_zoo.word_tokenizer(), sequence_length=8)
    ids, labels = rows.padded(np.array([0, 3]), pad_token=0)
    assert ids.tolist() == [[2, 3, 4, 0], [6, 0, 0, 0]]
    assert labels.tolist() == [[2, 3, 4, 0], [6, 0, -100, -100]]


def test_cache_is_used_again_and_rebuilt_when_anything_changes(make_store: MakeStore) -> None:
    store = make_store(RECORDS)
    calls: list[int] = []

    class Counted:
        """A tokenizer that tells when it is asked."""

        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def __call__(self, *arguments: Any, **options: Any) -> Any:
            calls.append(1)
            return self._inner(*arguments, **options)

    first = tokenise(store, Counted(models_zoo.word_tokenizer()), sequence_length=4)
    made = len(calls)
    again = tokenise(store, Counted(models_zoo.word_tokenizer()), sequence_length=4)
    assert len(calls) == made
    assert row_lists(again) == row_lists(first)
    other = tokenise(
        store, Counted(models_zoo.word_tokenizer(models_zoo.WORDS[::-1])), sequence_length=4
    )
    assert len(calls) > made
    assert row_lists(other) != row_lists(first)
    made = len(calls)
    tokenise(store, Counted(models_zoo.word_tokenizer()), sequence_length=5)
    assert len(calls) > made


def test_a_cache_is_its_owners_alone(make_store: MakeStore) -> None:
    store = make_store(RECORDS)
    tokenise(store, models_zoo.word_tokenizer(), sequence_length=4)
    cached = list((store.path / "tokens").rglob("*"))
    modes = {path.is_dir(): path.stat().st_mode & 0o777 for path in [store.path, *cached]}
    assert modes == {True: 0o700, False: 0o600}
    assert {path.stat().st_mode & 0o777 for path in cached if path.is_file()} == {0o600}


def test_user_whose_text_has_no_token_keeps_a_place_without_rows(make_store: MakeStore) -> None:
    tokenizer = models_zoo.word_tokenizer()
    tokenizer.backend_tokenizer.normalizer = tokenizers.normalizers.Replace("\u200b", "")
    store = make_store([Record("w1 w2", ("a",), "1"), Record("\u200b", ("b",), "2")])
    rows = tokenise(store, tokenizer, sequence_length=4)
    index = rows.index()
    assert [index.rows_of(user).tolist() for user in range(2)] == [[0], []]


def test_store_without_any_token_is_refused(make_store: MakeStore) -> None:
    tokenizer = models_zoo.word_tokenizer()
    tokenizer.backend_tokenizer.normalizer = tokenizers.normalizers.Replace("\u200b", "")
    with pytest.raises(InputError, match="no record has a token"):
        tokenise(make_store([Record("\u200b", ("b",), "2")]), tokenizer, sequence_length=4)


@pytest.mark.parametrize("length", [1, 0, -4])
def test_sequence_length_below_two_is_refused(make_store: MakeStore, length: int) -> None:
    with pytest.raises(InputError, match="sequence_length"):
        tokenise(make_store(RECORDS), models_zoo.word_tokenizer(), sequence_length=length)


def test_tokenizer_without_end_token_is_refused(make_store: MakeStore) -> None:
    tokenizer = models_zoo.word_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(InputError, match="end-of-text"):
        tokenise(make_store(RECORDS), tokenizer, sequence_length=4)


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


def test_records_of_several_owners_are_refused(tmp_path: Path) -> None:
    write_store([Record("ab", ("ann", "bob"), "1")], tmp_path / "s", key=KEY)
    with pytest.raises(InputError, match="several owners"):
        tokenise(UserStore.open(tmp_path / "s"), Letters(), sequence_length=4)


class Templated(Letters):
    """Writes what is said and refuses chats that do not begin with the user."""

    chat_template = "some template"

    def get_chat_template(self) -> str:
        return "some template"

    def apply_chat_template(self, messages: list[dict[str, str]], *, tokenize: bool) -> str:
        assert not tokenize
        if messages[0]["role"] != "user":
            # Whatever a program can raise.
            raise ZeroDivisionError(messages[0]["content"])
        return "|".join(message["content"] for message in messages)


def chat_store(path: Path, *chats: str) -> UserStore:
    records = [Record(chat, (f"u{number}",), f"{number}") for number, chat in enumerate(chats)]
    batches = batches_of(records, text_kind="chat")
    write_batches(batches, path, pseudonyms=Pseudonyms.under(KEY))
    return UserStore.open(path)


QUESTION, ANSWER = {"role": "human", "content": "hi"}, {"role": "gpt", "content": "yes"}


def test_chats_are_written_by_the_tokenizers_template_and_in_no_other_way(tmp_path: Path) -> None:
    store = chat_store(tmp_path / "s", json.dumps([QUESTION, ANSWER]))
    with pytest.raises(InputError, match=r"chat_template = FILE.*another column"):
        tokens_per_record(store, Letters())
    assert tokens_per_record(store, Templated()).tolist() == [len("hi|yes") + 1]


def test_a_chat_that_the_template_refuses_has_no_row_and_changes_no_others(tmp_path: Path) -> None:
    good, bad = json.dumps([QUESTION, ANSWER]), json.dumps([ANSWER, QUESTION])
    store = chat_store(tmp_path / "s", bad, good, bad)
    rows = tokenise(store, Templated(), sequence_length=16)
    alone = tokenise(chat_store(tmp_path / "t", good), Templated(), sequence_length=16)
    assert rows.owners.tolist() == [1]
    assert rows.num_users == 3
    assert rows.tokens.tolist() == alone.tokens.tolist()
    assert tokens_per_record(store, Templated()).tolist() == [0, len("hi|yes") + 1, 0]


def test_words_of_a_chat_are_those_of_its_messages() -> None:
    assert said_in(json.dumps([QUESTION, ANSWER]), "chat") == "hi\n\nyes"
    of_chats = json.dumps({"prompt": [QUESTION], "completion": [ANSWER]})
    of_texts = json.dumps({"prompt": "hi", "completion": "yes"})
    assert said_in(of_chats, "pair") == said_in(of_texts, "pair") == "hi\n\nyes"


SELECTED_LENGTH = 4
# Records of one to three rows, of two owners in turn; the last one has two owners.
SELECTED_WORDS = [3, 9, 2, 6, 11, 3]


@pytest.mark.parametrize("records", [[0, 1, 2, 3, 4, 5], [1, 4], [4, 4, 1], [5]], ids=str)
def test_selected_row_is_the_beginning_of_its_record_alone(
    records: list[int], make_store: Callable[[list[Record]], UserStore]
) -> None:
    texts = [" ".join(models_zoo.WORDS[i] for i in range(3, 3 + count)) for count in SELECTED_WORDS]
    owners = [("ann",), ("bob",), ("ann",), ("bob",), ("ann",), ("ann", "bob")]
    store = make_store(
        [
            Record(text, own, f"line {number}")
            for number, (text, own) in enumerate(zip(texts, owners, strict=True))
        ]
    )
    tokenizer = models_zoo.word_tokenizer()
    rows = tokenise_selected(store, tokenizer, np.array(records), sequence_length=SELECTED_LENGTH)
    found = [rows.tokens[a:b].tolist() for a, b in pairwise(rows.indptr)]
    # Tokenised here, one text at a time.
    closed = [
        [*tokenizer(texts[record], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        for record in records
    ]
    assert found == [tokens[:SELECTED_LENGTH] for tokens in closed]
    # The bound counts records: a long one is one row all the same.
    assert len(rows) == len(records)


def no_unknown_word(kind: str) -> Any:
    """A tokenizer that fails at words that it does not know."""
    words = {
        word: number for number, word in enumerate(["<end>", *(f"w{n}" for n in range(1, 20))])
    }
    models = tokenizers.models
    core = tokenizers.Tokenizer(
        models.WordLevel(words, unk_token="?")
        if kind == "words"
        else models.WordPiece(words, unk_token="?")
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<end>", pad_token="<end>"
    )


@pytest.mark.parametrize("kind", ["words", "pieces"])
def test_a_tokenizer_that_fails_at_unknown_words_is_refused_before_it_reads_anybodys(
    make_store: MakeStore, kind: str
) -> None:
    store = make_store(RECORDS)
    for read in (tokenise, lambda *args, **_: tokens_per_record(*args)):
        with pytest.raises(InputError, match=r"cannot read every text.*unk_token") as refused:
            read(store, no_unknown_word(kind), sequence_length=4)
        assert "zebra" not in str(refused.value)


class FailsAt:
    """A tokenizer in Python that fails at one word."""

    eos_token_id = 0

    def __init__(self, word: str) -> None:
        self._word, self._of = word, models_zoo.word_tokenizer()

    def __call__(self, texts: Any, **options: Any) -> Any:
        if any(self._word in text for text in texts):
            raise ValueError("what somebody wrote")
        return self._of(texts, **options)

    def get_vocab(self) -> dict[str, int]:
        return self._of.get_vocab()


def test_a_record_that_the_tokenizer_fails_at_has_no_row_and_changes_no_others(
    make_store: MakeStore,
) -> None:
    store = make_store(RECORDS)
    rows = tokenise(store, FailsAt("w5"), sequence_length=4)
    found = row_lists(rows)
    shutil.rmtree(store.path / "tokens")
    expected = row_lists(tokenise(store, models_zoo.word_tokenizer(), sequence_length=4))
    assert found == [row for row in expected if row != [6, 0]]
    assert tokens_per_record(store, FailsAt("w5")).tolist() == [4, 10, 0, 6]


class Learner:
    """A tokenizer that gives new words the next numbers."""

    eos_token_id = 0

    def __init__(self) -> None:
        self.words: dict[str, int] = {}

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {
            "input_ids": [
                [self.words.setdefault(word, len(self.words) + 1) for word in text.split()]
                for text in texts
            ]
        }

    def get_vocab(self) -> dict[str, int]:
        return {}


class AtRandom(Letters):
    """A tokenizer that cuts words otherwise each time."""

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        found = super().__call__(texts)["input_ids"]
        return {"input_ids": [[*ids, random.randrange(10**9)] for ids in found]}


def test_a_tokenizer_that_learns_words_as_it_reads_is_refused(make_store: MakeStore) -> None:
    store = make_store(RECORDS)
    with pytest.raises(InputError, match="learns words as it reads"):
        tokenise(store, Learner(), sequence_length=4)
    assert not list((store.path / "tokens").iterdir())
    # Chance teaches nothing.
    assert len(tokenise(store, AtRandom(), sequence_length=64)) == len(RECORDS)
