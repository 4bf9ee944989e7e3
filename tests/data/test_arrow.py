from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from importing import KEY, bring_in, contents, reading

from userdp.data.identity import Pseudonyms
from userdp.data.importers.arrow import dataset_batches
from userdp.data.importers.columns import Columns
from userdp.data.store import UserStore, write_batches
from userdp.errors import InputError


def write(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_folder_of_parquet_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "lake").mkdir()
    write(tmp_path / "lake" / "b.parquet", author_id=[7, 8], body=["three", "four"])
    write(tmp_path / "lake" / "a.parquet", author_id=[8, 9], body=["one", "two"])
    bring_in(tmp_path / "lake", tmp_path / "store")
    assert contents(UserStore.open(tmp_path / "store")) == [
        ("one", [0]),
        ("two", [1]),
        ("three", [2]),
        ("four", [0]),
    ]
    bring_in(tmp_path / "lake" / "*.parquet", tmp_path / "glob")
    assert contents(UserStore.open(tmp_path / "glob")) == contents(
        UserStore.open(tmp_path / "store")
    )


def test_lists_dictionaries_templates_and_times(tmp_path: Path) -> None:
    users = pa.array([["ann", "bob"], ["bob"]])
    texts = pa.array(["one", "two"]).dictionary_encode()
    path = write(tmp_path / "a.parquet", users=users, text=texts, year=[1970, None])
    bring_in(path, tmp_path / "store", reading(time="year"))
    store = UserStore.open(tmp_path / "store")
    assert contents(store) == [("one", [0, 1]), ("two", [1])]
    assert store.times is not None
    assert store.times[0] == 0
    bring_in(path, tmp_path / "filled", reading("users", "{year}: {text}"))
    assert UserStore.open(tmp_path / "filled").text(0) == "1970: one"


@pytest.mark.parametrize(
    ("users", "texts", "message"),
    [
        ([None, "a"], ["x", "y"], "row 1: column 'user' is null or empty"),
        (["a", " "], ["x", "y"], "row 2: column 'user' is null or empty"),
        ([1.0, 2.0], ["x", "y"], "whole numbers, not double"),
        (["a", "b"], ["x", None], "row 2: column 'text' is null"),
        (["a", "b"], ["x", "a\0b"], "row 2: column 'text' contains a NUL"),
        (["a", "b"], [1, 2], "holds int64, not strings"),
    ],
)
def test_bad_cells_name_the_row(
    tmp_path: Path, users: list[Any], texts: list[Any], message: str
) -> None:
    path = write(tmp_path / "a.parquet", user=users, text=texts)
    with pytest.raises(InputError, match=rf"a\.parquet, .*{message}"):
        bring_in(path, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_two_owner_columns_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", user=["a"], author=["b"], text=["x"])
    with pytest.raises(InputError, match=r"a\.parquet: 'user' and 'author' .*--user COLUMN"):
        bring_in(path, tmp_path / "store")
    assert bring_in(path, tmp_path / "store", reading(user="author")).users == 1


def test_templates_fill_more_rows_than_a_batch_holds(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", user=["a"] * 9000, text=["x"] * 9000)
    assert bring_in(path, tmp_path / "store", reading("{user}", "{text}")).records == 9000


def test_truncated_parquet_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", user=["a"] * 1000, text=["x"] * 1000)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"a\.parquet: truncated or not a Parquet file"):
        bring_in(path, tmp_path / "store")


def saved_dataset(folder: Path, table: pa.Table, name: str = "data.arrow") -> Path:
    """The layout of `save_to_disk`, written by hand."""
    folder.mkdir(parents=True)
    with (
        pa.OSFile(str(folder / "data.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    return folder


def test_saved_dataset_is_read_without_the_library_and_stays_inside_its_folder(
    tmp_path: Path,
) -> None:
    chats = [[{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]]
    table = pa.table({"user_id": ["ann"], "conversations": chats})
    bring_in(saved_dataset(tmp_path / "saved", table), tmp_path / "store")
    store = UserStore.open(tmp_path / "store")
    assert json.loads(store.text(0))[1] == {"role": "gpt", "content": "yes"}
    evil = saved_dataset(tmp_path / "evil", table, name="../saved/data.arrow")
    with pytest.raises(InputError, match="outside of itself"):
        bring_in(evil, tmp_path / "other")
    for number, name in enumerate(("\0", "\ud800")):
        odd = saved_dataset(tmp_path / f"odd{number}", table)
        state = json.loads((odd / "state.json").read_text())
        state["_data_files"] = [{"filename": name}]
        (odd / "state.json").write_text(json.dumps(state))
        with pytest.raises(InputError, match="no disk can hold"):
            bring_in(odd, tmp_path / "other")


def test_parquet_with_a_column_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"user": ["ann"], "zzzz": ["hi"]}), path)
    path.write_bytes(path.read_bytes().replace(b"zzzz", b"\x80zzz"))
    with pytest.raises(InputError, match="truncated or not a Parquet file"):
        bring_in(path, tmp_path / "store")


def test_datasets_loaded_and_saved_give_the_same_store(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra [hf] is not installed")
    loaded = datasets.Dataset.from_dict(
        {"author": [f"a{i % 5}" for i in range(50)], "text": [f"text {i}" for i in range(50)]}
    )
    datasets.DatasetDict({"train": loaded}).save_to_disk(str(tmp_path / "saved"))
    saved = bring_in(tmp_path / "saved", tmp_path / "a")
    direct = write_batches(
        dataset_batches(loaded, Columns()), tmp_path / "b", pseudonyms=Pseudonyms.under(KEY)
    )
    assert saved == direct
    shuffled = loaded.shuffle(seed=0)
    chosen = write_batches(
        dataset_batches(shuffled, Columns()), tmp_path / "c", pseudonyms=Pseudonyms.under(KEY)
    )
    assert UserStore.open(tmp_path / "c").text(0) == shuffled[0]["text"]
    assert chosen.records == 50
