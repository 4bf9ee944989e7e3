"""What of a dataset is learned: no record decides it for the others, and every label has a text."""

from __future__ import annotations

import math
from typing import Any

import pytest
import transformers
from tiny_llama import texts

from userdp import InputError, UserStore
from userdp.data.contents import label_of
from userdp.trainer.data import Reading, columns_of, training_store

pytest.importorskip("accelerate", reason="TrainingArguments needs accelerate")


def read(dataset: Any, place: Any, **given: Any) -> UserStore:
    args = transformers.TrainingArguments(output_dir=str(place), use_cpu=True)
    return training_store(dataset, Reading(args=args, user="user_id", **given), place / "store")


def labels(dataset: Any, place: Any) -> list[str]:
    store = read(dataset, place, task="classification", classes=("good", "bad"))
    return [label_of(store.text(record)) for record in range(store.num_records)]


def with_labels(*given: Any) -> list[dict[str, Any]]:
    return [row | {"label": label} for row, label in zip(texts(9), given, strict=False)]


@pytest.mark.parametrize(
    "odd",
    [-1, 9, True, 0.5, math.nan, None, "9", "\ud800", pytest.param(10**5000, id="many digits")],
)
def test_one_unknown_label_ends_no_import(odd: Any, tmp_path: Any) -> None:
    found = labels(with_labels(0, 1, odd, 1), tmp_path)
    assert [*found[:2], *found[3:]] == ["good", "bad", "bad"]
    assert found[2] not in ("good", "bad")


def test_numbers_of_classes_may_be_of_any_kind(tmp_path: Any) -> None:
    np = pytest.importorskip("numpy")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    assert labels(with_labels(np.int64(0), 1.0), tmp_path / "a") == ["good", "bad"]
    torch_rows = datasets.Dataset.from_list(with_labels(0, 1)).with_format("torch")
    assert labels(torch_rows, tmp_path / "b") == ["good", "bad"]
    # One missing label makes floats of all the others.
    frame = pandas.DataFrame(with_labels(0, 1, None))
    assert labels(frame, tmp_path / "c")[:2] == ["good", "bad"]


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"prompt": "a", "completion": "b"}, "'text' and 'prompt' and 'completion'"),
        ({"messages": [{"role": "user", "content": "a"}]}, "'messages' and 'text'"),
        ({"conversations": []}, "'conversations' and 'text'"),
    ],
)
def test_one_record_does_not_choose_the_columns_of_others(
    extra: dict[str, Any], named: str, tmp_path: Any
) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = [*texts(4), {"user_id": "other", "text": "red"} | extra]
    declared = datasets.Dataset.from_list(
        [{name: row.get(name) for name in rows[-1]} for row in rows]
    )
    for dataset in (rows, declared):
        assert set(columns_of(dataset)) == set(rows[-1])
        with pytest.raises(InputError, match=f"columns {named}, and each could be what is learned"):
            read(dataset, tmp_path)
    with pytest.raises(InputError, match="columns label and labels"):
        labels([*with_labels(0, 1), texts(1)[0] | {"labels": 0}], tmp_path)
