"""How the program ends: disks, paths and Ctrl-C give one line and an exit code."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from cli_runner import python, userdp
from stores import write_lines
from userdp import cli
from userdp.cli import stats
from userdp.data import write


def fail_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, 1),
        (errno.EIO, 1),
        (errno.EDQUOT, 1),
        (errno.ESTALE, 1),
        (errno.EACCES, 2),
        (errno.EROFS, 2),
        (errno.ENOTDIR, 2),
        (errno.ENAMETOOLONG, 2),
    ],
)
def test_an_error_of_the_system_is_its_path_and_its_reason(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(OSError(number, os.strerror(number), "run/ledger.jsonl"), monkeypatch)
    result = userdp()
    assert result.code == code
    assert result.err == f"error: run/ledger.jsonl: {os.strerror(number)}.\n"


def test_words_of_a_library_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(OSError("cannot parse 'dear diary'"), monkeypatch)
    result = userdp()
    assert (result.code, result.err) == (1, "error: reading or writing failed.\n")


def test_a_path_with_a_line_break_is_one_line(tmp_path: Path) -> None:
    result = userdp("stats", tmp_path / "a\nb")
    assert result.code == 2
    assert result.err.count("\n") == 1


def test_ctrl_c_is_130_and_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stats.UserStore, "open", interrupt)
    result = userdp("stats", tmp_path)
    assert result.code == 130
    assert result.err.startswith("error: interrupted")
    assert result.err.count("\n") == 1
    fail_with(KeyboardInterrupt(), monkeypatch)
    assert userdp().code == 130


def test_a_full_disk_while_importing_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "data.jsonl")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "store"))

    monkeypatch.setattr(write, "_write_manifest", full)
    result = userdp("import", source, "--out", tmp_path / "store")
    assert result.code == 1
    assert "No space left on device" in result.err
    assert result.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to_is_wrong_input(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "data.jsonl")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    result = userdp("import", source, "--out", locked / "store")
    assert result.code == 2
    assert "Permission denied" in result.err
    assert result.err.count("\n") == 1


def test_no_command_is_the_help_and_exit_code_2() -> None:
    result = userdp()
    assert result.code == 2
    assert "Usage" in result.err + result.out


@pytest.mark.slow
def test_the_program_ends_with_the_exit_code_of_a_command_as_a_shell_sees_it() -> None:
    code = "import sys\nfrom userdp.cli import main\nsys.argv[0] = 'userdp'\nmain()"
    wrong = python(code, "account", "--ratee", "1")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: No such option: --ratee")
    assert wrong.stderr.endswith("See `userdp account --help`.\n")
    assert wrong.stderr.count("\n") == 1
    assert python(code, "account", "--help").returncode == 0


def test_ctrl_c_while_the_commands_are_imported_is_one_line() -> None:
    code = (
        "import sys\n"
        "from userdp.__main__ import main\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'userdp.cli':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "main()\n"
    )
    result = python(code)
    assert (result.returncode, result.stderr) == (
        130,
        "error: interrupted: nothing was done.\n",
    )
