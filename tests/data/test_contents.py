"""Prompts with completions and labelled texts: what an import keeps of them and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from importing import KEY, bring_in

from userdp.data.append import append_batches
from userdp.data.contents import label_of, labelled_json, pair_json, pair_of, text_of
from userdp.data.identity import Pseudonyms
from userdp.data.importers.columns import Columns
from userdp.data.record import Record, batches_of
from userdp.data.sources import Reading
from userdp.data.split import write_subset
from userdp.data.store import UserStore, write_batches
from userdp.errors import InputError

PAIRS = [
    {"user": "ann", "prompt": "2 + 2 =", "completion": " 4"},
    {"user": "bob", "prompt": "", "completion": "hi"},
    {"user": "ann", "prompt": "nothing", "completion": " "},
]
LABELLED = [
    {"user": "ann", "text": "fine", "mood": "good"},
    {"user": "bob", "text": "bad", "mood": 3},
    {"user": "cy", "text": "none", "mood": None},
]


def as_file(rows: list[dict[str, Any]], path: Path, kind: str) -> Path:
    source = path / f"data.{kind}"
    if kind == "jsonl":
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "csv":
        names = list(rows[0])
        cells = [[("" if row[name] is None else str(row[name])) for name in names] for row in rows]
        source.write_text("\n".join(",".join(line) for line in [names, *cells]) + "\n")
    else:
        # A column of Parquet has one type.
        plain = [{n: v if v is None else str(v) for n, v in row.items()} for row in rows]
        pq.write_table(pa.Table.from_pylist(plain), source)
    return source


def columns(**names: Any) -> Reading:
    return Reading(columns=Columns(**names))


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("named", [False, True])
def test_prompts_keep_their_completions(kind: str, named: bool, tmp_path: Path) -> None:
    choice = columns(text="prompt", completion="completion") if named else columns()
    result = bring_in(as_file(PAIRS, tmp_path, kind), tmp_path / "store", choice)
    store = UserStore.open(tmp_path / "store")
    assert store.text_kind == "pair"
    kept = [pair_of(store.text(record)) for record in range(store.num_records)]
    assert kept == [("2 + 2 =", " 4"), ("", "hi")]
    assert result.skipped == {"empty text": 1}


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_texts_keep_their_labels_as_words(kind: str, tmp_path: Path) -> None:
    bring_in(as_file(LABELLED, tmp_path, kind), tmp_path / "store", columns(label="mood"))
    store = UserStore.open(tmp_path / "store")
    assert store.text_kind == "labelled"
    stored = [store.text(record) for record in range(3)]
    assert [label_of(one) for one in stored] == ["good", "3", ""]
    assert [text_of(one, "labelled", None) for one in stored] == ["fine", "bad", "none"]


def test_parts_of_a_store_and_additions_to_it_keep_its_kind(tmp_path: Path) -> None:
    bring_in(as_file(LABELLED, tmp_path, "jsonl"), tmp_path / "store", columns(label="mood"))
    store = UserStore.open(tmp_path / "store")
    write_subset(store, store.records_of(0), tmp_path / "part")
    part = UserStore.open(tmp_path / "part")
    assert (part.text_kind, label_of(part.text(0))) == ("labelled", "good")
    (tmp_path / "room").mkdir()
    more = batches_of([Record(labelled_json("more", "bad"), ("ann",), "1")], text_kind="labelled")
    append_batches(
        store,
        more,
        tmp_path / "whole",
        scratch=tmp_path / "room",
        pseudonyms=Pseudonyms.under(KEY),
    )
    whole = UserStore.open(tmp_path / "whole")
    assert (whole.text_kind, label_of(whole.text(3))) == ("labelled", "bad")
    assert whole.num_users == 3


def test_other_labels_are_other_data(tmp_path: Path) -> None:
    names: list[str] = []
    for label in ("good", "bad"):
        records = [Record(labelled_json("same words", label), ("ann",), "1")]

        result = write_batches(
            batches_of(records, text_kind="labelled"),
            tmp_path / label,
            pseudonyms=Pseudonyms.under(KEY),
        )
        names.append(result.fingerprint)
    assert names[0] != names[1]


@pytest.mark.parametrize(
    ("rows", "choice", "says"),
    [
        ([PAIRS[0], {"user": "ann", "text": "t"}], {}, "each could be the text column"),
        ([{"user": "ann", "prompt": "p"}], {}, "no text column"),
        ([PAIRS[0], {"user": "bob", "prompt": "p"}], {}, "line 2: field 'completion' is missing"),
        (
            [{"user": "ann", "text": "t", "mood": [1]}],
            {"label": "mood"},
            "line 1: field 'mood' is not a string or a number",
        ),
        (
            [{"user": "ann", "messages": [{"role": "user", "content": "hi"}], "mood": "x"}],
            {"label": "mood"},
            "takes no --label",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    rows: list[dict[str, Any]], choice: dict[str, str], says: str, tmp_path: Path
) -> None:
    source = as_file(rows, tmp_path, "jsonl")
    with pytest.raises(InputError, match=says):
        bring_in(source, tmp_path / "store", columns(**choice))


def test_a_completion_and_a_label_exclude_each_other() -> None:
    with pytest.raises(InputError, match="exclude each other"):
        Columns(completion="a", label="b")


def test_labels_are_for_sources_with_columns(tmp_path: Path) -> None:
    source = tmp_path / "play.txt"
    source.write_text("ANN:\nHello there, all of you.\n")
    with pytest.raises(InputError, match="name columns"):
        bring_in(source, tmp_path / "store", columns(label="mood"))


def test_kinds_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    pairs = as_file(PAIRS, tmp_path / "a", "jsonl")
    plain = as_file([{"user": "ann", "text": "t"}], tmp_path / "b", "jsonl")
    with pytest.raises(InputError, match="prompts with completions and some plain text"):
        bring_in([pairs, plain], tmp_path / "store")


def test_a_blank_completion_and_a_blank_text_are_no_record() -> None:
    assert pair_json("prompt", " \n") == labelled_json(" ", "label") == ""
