"""A population's file: every changed byte and every cut is found, and nothing is lost."""

from __future__ import annotations

import errno
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from cli_runner import cli
from userdp.budget import file as budget_file
from userdp.budget.file import BudgetFile
from userdp.errors import LedgerError
from userdp.files.chain import Row

SOURCE = str(Path(cli.__file__).resolve().parents[2])


def made(tmp_path: Path, *rows: Row) -> BudgetFile:
    file = BudgetFile(tmp_path / "s.population")
    file.create({"id": "a" * 32, "instead_of": None})
    for row in rows:
        add(file, row)
    return file


def add(file: BudgetFile, row: Row) -> None:
    with file.adding() as adding:
        adding.add(row)


def small(tmp_path: Path) -> BudgetFile:
    return made(
        tmp_path,
        {"kind": "limit", "epsilon": 4.0, "delta": 1e-6},
        {"kind": "debit", "entry": "b" * 32, "what": "a median", "adjacency": "add-remove"},
    )


def contents(file: BudgetFile) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in file.directory.rglob("*") if path.is_file()}


def test_the_rows_come_back_and_only_their_owner_can_read_them(tmp_path: Path) -> None:
    file = small(tmp_path)
    assert [row["kind"] for row in file.rows()] == ["population", "limit", "debit"]
    places = [file.directory, *file.directory.rglob("*")]
    modes = {place: stat.S_IMODE(place.stat().st_mode) for place in places}
    assert all(mode == (0o700 if place.is_dir() else 0o600) for place, mode in modes.items())
    assert len(modes) == 5


@pytest.mark.parametrize("name", ["budget.jsonl", "secret/budget.head", "secret/budget.key"])
def test_every_truncation_is_found_or_harmless(tmp_path: Path, name: str) -> None:
    file = small(tmp_path)
    rows, place = file.rows(), file.directory / name
    whole = place.read_bytes()
    harmless = []
    for length in range(len(whole)):
        place.write_bytes(whole[:length])
        try:
            assert file.rows() == rows, length
            harmless.append(length)
        except LedgerError:
            pass
    # Only the key may end without its line's end.
    assert harmless == ([len(whole) - 1] if name.endswith("key") else [])


@pytest.mark.parametrize("name", ["budget.jsonl", "secret/budget.head", "secret/budget.key"])
def test_every_edited_byte_is_found_or_harmless(tmp_path: Path, name: str) -> None:
    file = small(tmp_path)
    rows, place = file.rows(), file.directory / name
    whole = place.read_bytes()
    found = 0
    for position, byte in enumerate(whole):
        for other in {byte ^ 1, byte ^ 0x20, ord("\n"), ord("0"), 0, 255} - {byte}:
            place.write_bytes(whole[:position] + bytes([other]) + whole[position + 1 :])
            try:
                assert file.rows() == rows, (position, other)
            except LedgerError:
                found += 1
            else:
                # The same key in capitals, or another white space behind it.
                assert name.endswith("key"), (position, other)
    assert found > 3 * len(whole)


def test_a_row_taken_from_the_end_is_found(tmp_path: Path) -> None:
    file = small(tmp_path)
    lines = file.path.read_bytes().splitlines(keepends=True)
    file.path.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(LedgerError, match="3 rows were written, and 2 whole ones are left"):
        file.rows()
    with pytest.raises(LedgerError, match="cut off"):
        add(file, {"kind": "limit", "epsilon": 1.0, "delta": 1e-6})


@pytest.mark.parametrize("name", ["budget.jsonl", "secret/budget.head", "secret/budget.key"])
def test_a_missing_file_is_found(tmp_path: Path, name: str) -> None:
    file = small(tmp_path)
    (file.directory / name).unlink()
    with pytest.raises(LedgerError, match=re.escape(Path(name).name)):
        file.rows()


def test_another_key_is_found(tmp_path: Path) -> None:
    file = small(tmp_path)
    (file.directory / "secret" / "budget.key").write_text("ab" * 32 + "\n")
    with pytest.raises(LedgerError, match="line 1"):
        file.rows()


def test_a_format_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = small(tmp_path)
    monkeypatch.setattr(budget_file, "FORMAT", 2)
    with pytest.raises(LedgerError, match="a format this version does not read"):
        file.rows()


def test_killed_at_any_byte_of_a_row_the_row_is_there_or_not(tmp_path: Path) -> None:
    file = small(tmp_path)
    rows, before = file.rows(), contents(file)
    # Longer than the row that comes after it, so that what is left of it would show.
    add(file, {"kind": "limit", "epsilon": 2.0, "delta": 1e-6, "why": "x" * 40})
    after = file.path.read_bytes()
    for length in range(len(before[file.path]), len(after) + 1):
        # The head is written after the row, so it still counts the rows before.
        for path, content in before.items():
            path.write_bytes(content)
        file.path.write_bytes(after[:length])
        is_whole = length == len(after)
        assert len(file.rows()) == len(rows) + is_whole
        assert file.path.read_bytes() == after[:length], "reading changes nothing"
        add(file, {"kind": "limit", "epsilon": 3.0, "delta": 1e-6})
        # What is left of a torn row would be taken for one that a second kill left.
        assert file.path.read_bytes().endswith(b"}\n")
        found = [row["epsilon"] for row in file.rows() if row["kind"] == "limit"]
        assert found == ([4.0, 2.0, 3.0] if is_whole else [4.0, 3.0])


def test_two_rows_more_than_were_counted_are_refused(tmp_path: Path) -> None:
    file = small(tmp_path)
    head = file.directory / "secret" / budget_file.HEAD
    old = head.read_bytes()
    for epsilon in (2.0, 3.0):
        add(file, {"kind": "limit", "epsilon": epsilon, "delta": 1e-6})
    head.write_bytes(old)
    with pytest.raises(LedgerError, match="not those that were counted"):
        file.rows()


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_full_disk_leaves_the_file_as_it_was_or_counts_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    file = small(tmp_path)
    before = contents(file)
    calls = iter(range(1, 100))
    real = os.fsync

    def full(descriptor: int) -> None:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(LedgerError, match="No space left on device"):
            add(file, {"kind": "limit", "epsilon": 2.0, "delta": 1e-6})
    kept = 4 if call == 3 else 3
    if call < 3:
        assert contents(file) == before
    # The third flush is that of the directory, after the row was counted: it stays counted.
    assert len(file.rows()) == kept
    add(file, {"kind": "limit", "epsilon": 2.0, "delta": 1e-6})
    assert len(file.rows()) == kept + 1


def test_half_a_row_on_a_full_disk_is_taken_back(tmp_path: Path) -> None:
    file = small(tmp_path)
    before = contents(file)

    class Full:
        """A disk that takes half of a row and no more."""

        def __init__(self, real: Any) -> None:
            self.real, self.calls = real, 0

        def write(self, content: bytes) -> int:
            self.calls += 1
            if self.calls > 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.real.write(content[: len(content) // 2])

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    with file.adding() as adding:
        adding._file = Full(adding._file)  # type: ignore[assignment]
        with pytest.raises(LedgerError, match="No space left on device"):
            adding.add({"kind": "limit", "epsilon": 2.0, "delta": 1e-6})
    assert contents(file) == before


def test_the_first_of_two_creators_stays(tmp_path: Path) -> None:
    file = made(tmp_path)
    file.create({"id": "c" * 32, "instead_of": None})
    assert file.rows()[0]["id"] == "a" * 32
    assert [path.name for path in tmp_path.iterdir()] == ["s.population"]


def test_a_writer_waits_for_another_and_says_so_if_it_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = made(tmp_path)
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with file.adding():
            held.set()
            release.wait(60)

    other = threading.Thread(target=hold)
    other.start()
    assert held.wait(60)
    monkeypatch.setattr(budget_file, "WAIT_SECONDS", 0.05)
    try:
        with pytest.raises(LedgerError, match="another process has held it"):
            file.rows()
        monkeypatch.setattr(budget_file, "WAIT_SECONDS", 60.0)
        threading.Timer(0.1, release.set).start()
        add(file, {"kind": "limit", "epsilon": 2.0, "delta": 1e-6})
    finally:
        release.set()
        other.join()
    assert len(file.rows()) == 2


ADDS = """
import sys
from pathlib import Path
from userdp.budget.file import BudgetFile
file = BudgetFile(Path(sys.argv[1]))
if not file.exists:
    file.create({"id": sys.argv[2], "instead_of": None})
for number in range(int(sys.argv[3])):
    with file.adding() as adding:
        adding.add({"kind": "debit", "by": sys.argv[2], "number": number})
    print(number, flush=True)
"""


def start(directory: Path, name: str, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ADDS, str(directory), name, str(count)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": SOURCE},
    )


def test_two_processes_that_create_and_add_at_once_lose_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "s.population"
    both = [start(directory, name, 40) for name in ("a", "b")]
    for process in both:
        process.communicate(timeout=120)
    assert [process.returncode for process in both] == [0, 0]
    rows = BudgetFile(directory).rows()[1:]
    for name in ("a", "b"):
        assert [row["number"] for row in rows if row["by"] == name] == list(range(40))
    assert [path.name for path in tmp_path.iterdir()] == ["s.population"]


@pytest.mark.parametrize("after", [1, 7, 20])
def test_a_killed_writer_loses_nothing_that_it_acknowledged(tmp_path: Path, after: int) -> None:
    directory = tmp_path / "s.population"
    process = start(directory, "a", 100_000)
    assert process.stdout is not None
    for _ in range(after):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    told = after + len(process.stdout.read().split())
    process.stdout.close()
    process.wait(timeout=60)
    file = BudgetFile(directory)
    numbers = [row["number"] for row in file.rows()[1:]]
    # One row may be on disk before it was told.
    assert numbers in (list(range(told)), list(range(told + 1)))
    add(file, {"kind": "debit", "number": "next"})
    assert [row["number"] for row in file.rows()[1:]] == [*numbers, "next"]
