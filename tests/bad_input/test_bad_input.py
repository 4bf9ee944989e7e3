"""Every bad input ends with its exit code and one line, tells nothing, and leaves nothing.

The tables are in the files beside this one; each entry makes its input and names its command.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bad_input import of_models, of_settings, of_sources
from bad_input.making import TEXT, USER, Bad, Place, Shared
from cli_runner import userdp
from stores import KEY
from userdp.data.record import Record
from userdp.data.store import write_store

TABLE = [*of_sources.TABLE, *of_settings.TABLE, *of_models.TABLE]

# What commands print beside their errors.
BESIDE = ("note: ", "caution: ", "training", "probing ")


@pytest.fixture(scope="module")
def shared(
    base_model: Path,
    train_store: Path,
    held_out_store: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Shared:
    folder = tmp_path_factory.mktemp("shared")
    records = [Record(f"w{i % 7} {TEXT}", (f"u{i}", USER), f"record {i}") for i in range(6)]
    write_store(records, folder / "owned_by_two", key=KEY)
    found = Shared(
        model=base_model,
        train=train_store,
        held_out=held_out_store,
        owned_by_two=folder / "owned_by_two",
        run=folder / "run",
    )
    config = Place(folder=folder, shared=found).config(training="steps = 2")
    result = userdp("train", config, "--out", found.run)
    assert result.code == 0, result.err
    return found


def test_there_are_at_least_a_hundred_and_no_name_twice() -> None:
    names = [bad.name for bad in TABLE]
    assert len(names) >= 100
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("bad", TABLE, ids=lambda bad: bad.name)
def test_a_bad_input_ends_with_one_line_and_leaves_nothing(
    bad: Bad, shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A name that is no path is asked for on the hub; nothing outside may be reached by a test.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    arguments = bad.make(Place(folder=tmp_path, shared=shared))
    before = sorted(tmp_path.rglob("*"))
    result = userdp(*arguments)
    lines = [line for line in result.err.splitlines() if not line.startswith(BESIDE)]
    assert result.code == bad.code, result
    assert result.out == ""
    assert len(lines) == 1, result.err
    assert lines[0].startswith("error: ")
    assert bad.says in lines[0]
    assert len(lines[0]) < 1000
    for secret in (TEXT, USER):
        assert secret not in result.err.lower()
    assert sorted(tmp_path.rglob("*")) == before
