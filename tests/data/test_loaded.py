"""Data that is loaded already becomes the store that its file would have become."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from importing import contents

from cli_runner import python
from cli_runner import userdp as command
from userdp import InputError, UserStore
from userdp.data.identity import IdRule

ROWS = [
    {"user_id": f"u{i % 3}", "text": f"words number {i}", "messages": None, "other": 1.5}
    for i in range(7)
]
CHATS = [
    {
        "user_id": i,
        "messages": [
            {"role": "user", "content": f"hello {i}"},
            {"role": "assistant", "content": "yes"},
        ],
    }
    for i in range(3)
]


def frame(rows: list[dict[str, Any]]) -> Any:
    return pytest.importorskip("pandas", reason="pandas is not installed").DataFrame(rows)


def dataset(rows: list[dict[str, Any]]) -> Any:
    return pytest.importorskip("datasets", reason="datasets is not installed").Dataset.from_list(
        rows
    )


KINDS: dict[str, Any] = {
    "list": list,
    "generator": iter,
    "table": pa.Table.from_pylist,
    "data frame": frame,
    "dataset": dataset,
    "shuffled back": lambda rows: dataset(rows[::-1]).select(range(len(rows) - 1, -1, -1)),
    "streamed": lambda rows: dataset(rows).to_iterable_dataset(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_store_is_that_of_the_file(tmp_path: Path, kind: str) -> None:
    key = tmp_path / "ids.key"
    store = UserStore.from_dataset(KINDS[kind](ROWS), tmp_path / "store", key=key)
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    done = command(
        *("import", lines, "--out", tmp_path / "same", "--key", key),
        *("--user", "user_id", "--text", "text"),
    )
    assert done.code == 0, done.err
    assert contents(store) == [(row["text"], [i % 3]) for i, row in enumerate(ROWS)]
    assert store.fingerprint == UserStore.open(tmp_path / "same").fingerprint
    assert store.shares_users_with(UserStore.open(tmp_path / "same")) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_chats_stay_chats(tmp_path: Path, kind: str) -> None:
    store = UserStore.from_dataset(KINDS[kind](CHATS), tmp_path / "store", text="messages")
    assert store.manifest["text_kind"] == "chat"
    assert json.loads(store.text(2)) == CHATS[2]["messages"]


def test_a_temporary_store_is_for_its_owner_and_goes_with_the_object() -> None:
    store = UserStore.from_dataset(ROWS)
    folder = store.path.parent
    assert folder.stat().st_mode & 0o777 == 0o700
    store.verify()
    del store
    gc.collect()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([{"user_id": "a"}], "there is no column 'text'"),
        ([{"user_id": "a", "text": "x"}, {"text": "y"}], "row 2: column 'user_id' is null"),
        ([{"user_id": "a", "text": "x"}, {"user_id": "b", "text": 3}], "values of several kinds"),
        ([("a", "x")], "must be a dict"),
        ([], "no user column|there is no column"),
        ("rows.jsonl", "files are read by `userdp import`"),
        (pa.table({"user_id": [1.5], "text": ["x"]}), "whole numbers, not double"),
        (pa.table({"user_id": ["a"], "txt": ["x"]}), "Did you mean 'txt'"),
    ],
)
def test_what_cannot_be_imported_is_refused_and_leaves_nothing(
    tmp_path: Path, data: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        UserStore.from_dataset(data, tmp_path / "store")
    assert not list(tmp_path.iterdir())


def test_several_splits_are_refused() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    both = datasets.DatasetDict({"train": dataset(ROWS), "test": dataset(ROWS)})
    with pytest.raises(InputError, match="choose one of 'train', 'test'"):
        UserStore.from_dataset(both)


def test_ids_that_look_alike_are_refused_until_their_meaning_is_said() -> None:
    rows = [{"user_id": "Ann", "text": "x"}, {"user_id": "ann ", "text": "y"}]
    with pytest.raises(InputError):
        UserStore.from_dataset(rows)
    assert UserStore.from_dataset(rows, ids=IdRule.MERGE).num_users == 1


def test_nothing_here_imports_datasets_or_pandas() -> None:
    done = python(
        "import sys, userdp\n"
        "userdp.UserStore.from_dataset([{'user_id': 'a', 'text': 'x'}])\n"
        "assert 'datasets' not in sys.modules and 'trl' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


def test_ids_that_differ_in_case_are_said_to_be_one_person_from_python(tmp_path: Path) -> None:
    rows = [{"user_id": name, "text": "red"} for name in ("ann", "Ann")]
    with pytest.raises(InputError, match=r'from_dataset\(\.\.\., ids="merge"\)'):
        UserStore.from_dataset(rows, tmp_path / "refused")
    assert UserStore.from_dataset(rows, tmp_path / "merged", ids="merge").num_users == 1
