"""The benchmark of clipping keeps its rows' keys and refuses names it does not know."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "clipping.py"
SMALL = "--models gpt2-tiny --finetune full --lengths 16 --tokens 128 --groups 4 --repetitions 1"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """The benchmark, on whatever device there is; what it measures runs in processes of its own."""
    spec = importlib.util.spec_from_file_location("benchmark_of_clipping", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [str(BENCHMARK), *arguments])
    module.main()


def test_rows_say_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = ["ordinary", "eager", "userdp", "plain"]
    results, picture = tmp_path / "rows.json", tmp_path / "rows.svg"
    files = ("--json", str(results), "--plot", str(picture))
    run(monkeypatch, *SMALL.split(), "--methods", ",".join(methods), *files)
    rows = json.loads(results.read_text())
    assert sorted(row["method"] for row in rows) == sorted(methods)
    floor = next(row["milliseconds"] for row in rows if row["method"] == "ordinary")
    for row in rows:
        of_users = row["method"] in ("userdp", "plain")
        wanted = {"model": "gpt2-tiny", "finetune": "full", "sequence_length": 16}
        wanted |= {"unit": "user", "group_size": 4} if of_users else {"unit": "record"}
        assert row.items() >= wanted.items()
        assert row["ratio"] == pytest.approx(row["milliseconds"] / floor)
        assert "peak_gib" in row
    assert picture.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("option", "value"),
    [("--methods", "userpd"), ("--models", "gpt3"), ("--settings", "gpt2-tiny:half:16")],
)
def test_unknown_names_are_refused_before_anything_runs(
    option: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, option, value)
    assert stopped.value.code == 2
    assert "there are" in capsys.readouterr().err
