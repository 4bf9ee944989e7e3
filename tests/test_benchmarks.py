"""The benchmarks of clipping and of runs keep their rows' keys, refuse what they cannot measure."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
# What is started by its path or its module.
PROGRAMS = [
    path
    for folder in ("benchmarks", "reproductions", "tools")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
]
SMALL = "--models gpt2-tiny --finetune full --lengths 16 --tokens 128 --groups 4 --repetitions 1"


METHODS = ("--methods", "ordinary,userdp,plain")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, name: str = "clipping") -> None:
    """The benchmark, on whatever device there is."""
    # One imports from the other.
    modules = {each: load(monkeypatch, each) for each in ("clipping", "training_run")}
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    modules[name].main()


def load(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """A benchmark as a module."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the benchmark would start as a process of its own runs here: importing takes longest."""

    class Here:
        def __init__(self, command: list[str], **_: Any) -> None:
            self.arguments = command[1:]

        def wait(self) -> None:
            before = sys.argv
            sys.argv = self.arguments
            sys.modules["clipping"].main()
            sys.argv = before

    monkeypatch.setattr(subprocess, "Popen", Here)


@contextlib.contextmanager
def refused(capsys: pytest.CaptureFixture[str], reason: str) -> Iterator[None]:
    """The command line is wrong, and is told why."""
    with pytest.raises(SystemExit) as stopped:
        yield
    assert stopped.value.code == 2
    assert reason in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_every_program_says_how_it_is_used_and_runs_nothing(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # What Python does for a script that is named on the command line.
    monkeypatch.syspath_prepend(program.parent)
    monkeypatch.setattr(sys, "argv", [program.name, "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(program), run_name="__main__")
    assert not stopped.value.code
    assert capsys.readouterr().out.startswith("usage:")


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_rows_say_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_rows(tmp_path, monkeypatch)


@pytest.mark.slow
def test_rows_of_processes_say_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_rows(tmp_path, monkeypatch)


def check_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = ["ordinary", "eager", "userdp", "userdp-checkpointed", "plain"]
    results, picture = tmp_path / "rows.json", tmp_path / "rows.svg"
    files = ("--json", str(results), "--plot", str(picture))
    run(monkeypatch, *SMALL.split(), "--methods", ",".join(methods), *files)
    rows = json.loads(results.read_text())
    assert sorted(row["method"] for row in rows) == sorted(methods)
    floor = next(row["milliseconds"] for row in rows if row["method"] == "ordinary")
    for row in rows:
        of_users = row["method"] not in ("ordinary", "eager")
        wanted = {"model": "gpt2-tiny", "finetune": "full", "sequence_length": 16}
        wanted |= {"unit": "user", "group_size": 4} if of_users else {"unit": "record"}
        assert row.items() >= wanted.items()
        assert row["ratio"] == pytest.approx(row["milliseconds"] / floor)
        assert "peak_gib" in row
    assert picture.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--methods", "userpd", "no such method: 'userpd'; there are ordinary"),
        ("--models", "gpt3", "no such model: 'gpt3'; there are gpt2"),
        ("--settings", "gpt2-tiny:half:16", "no such way of fine-tuning: 'half'; there are lora"),
        ("--settings", "gpt2-tiny", "is not model:finetune:length"),
        ("--repetitions", "0", "0 is less than 1"),
        ("--lengths", "16,0", "0 is less than 1"),
        ("--groups", "3", "8 rows of 16 tokens are not users of 3 rows each"),
        ("--groups", "16", "8 rows of 16 tokens are not users of 16 rows each"),
        ("--json", "nowhere/rows.json", "there is no folder nowhere"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(
    option: str,
    value: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with refused(capsys, reason):
        run(monkeypatch, *SMALL.split(), option, value)


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_a_run_in_which_all_failed_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    # Longer than the model's positions.
    with pytest.raises(SystemExit, match="nothing could be measured"):
        run(monkeypatch, *SMALL.split(), "--tokens", "8192", "--lengths", "2048", *METHODS)


@pytest.mark.slow
def test_a_whole_run_is_compared_with_its_bare_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "run.json"
    sizes = "--length 16 --group-size 4 --cohort 4 --warm 2 --steps 2 --stretch 1"
    run(monkeypatch, *sizes.split(), "--json", str(results), name="training_run")
    (row,) = json.loads(results.read_text())
    assert row["steps"] == 2
    assert row["bare_tokens_per_second"] > 0
    # Padding adds to what is computed, not to what is useful; a full cohort has none.
    assert 0 < row["useful_share"] <= row["padded_share"]


def test_a_run_on_real_records_counts_its_evaluations(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arrays = {
        "tokens": np.arange(320, dtype=np.uint16) % 50,
        "indptr": np.arange(0, 321, 8),
        "owners": np.arange(40) // 4,
        "num_users": np.int64(10),
    }
    rows = tmp_path / "rows.npz"
    parts = ("train", "test")
    np.savez(rows, **{f"{part}_{name}": arrays[name] for part in parts for name in arrays})
    results = tmp_path / "run.json"
    sizes = "--length 16 --group-size 4 --cohort 4 --warm 2 --steps 2 --stretch 1"
    given = ["--rows", str(rows), "--json", str(results)]
    run(monkeypatch, *sizes.split(), *given, name="training_run")
    (row,) = json.loads(results.read_text())
    assert row["rows"] == "rows"
    assert row["evaluation_seconds"] > 0
    assert 0 < row["useful_share_with_evaluation"] < row["useful_share"]
    # Four records of 8 tokens are two rows of 16.
    assert row["own_group_size"] == 2
    assert 0 < row["own_size_with_evaluation"] < row["useful_share_of_own_size"]


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--model", "gpt3", "invalid choice: 'gpt3'"),
        ("--finetune", "half", "invalid choice: 'half'"),
        ("--steps", "0", "0 is less than 1"),
        ("--group-size", "3", "tokens are not users of 3 rows each"),
        ("--json", "nowhere/run.json", "there is no folder nowhere"),
    ],
)
def test_a_run_that_cannot_be_measured_is_refused_before_it_begins(
    option: str,
    value: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with refused(capsys, reason):
        run(monkeypatch, option, value, name="training_run")


def test_measurements_on_a_gpu_are_kept_one_by_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_gpu = load(monkeypatch, "on_gpu")
    writes = "import json, sys; json.dump([7], open(sys.argv[2], 'w'))"
    chosen = [
        on_gpu.Measurement("good", ["-c", writes], 20),
        on_gpu.Measurement("bad", ["-c", "raise SystemExit(3)"], 20, writes_json=False),
        on_gpu.Measurement("slow", ["-c", "import time; time.sleep(60)"], 1),
        on_gpu.Measurement("large", ["-c", "raise AssertionError"], 1e6),
    ]
    until = time.perf_counter() + 100
    failed = on_gpu.measure(chosen, tmp_path, until=until, caches=tmp_path)
    assert failed == ["bad", "slow", "large"]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["good"]["result"] == [7]
    assert results["bad"]["failed"] == 3
    assert results["slow"]["failed"] == "ended after 1 s"
    assert "left_out" in results["large"]
    assert "==== slow" in (tmp_path / "log.txt").read_text()


def test_programs_of_the_gpus_measurements_take_their_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_gpu = load(monkeypatch, "on_gpu")
    programs = [each.arguments for each in on_gpu.MEASUREMENTS if each.name != "tests"]
    assert len(programs) > 5
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    for program, *arguments in programs:
        name = Path(program).stem
        # An argument that comes last and is wrong: all others were understood.
        monkeypatch.setattr(sys, "argv", [program, *arguments, "--no-such-argument"])
        with pytest.raises(SystemExit):
            load(monkeypatch, name).main()
        assert "unrecognized arguments: --no-such-argument\n" in capsys.readouterr().err
