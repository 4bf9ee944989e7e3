"""One writer at a time, and who it is."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from userdp.errors import LedgerError
from userdp.files.lock import Owner, hold, lock_path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "rows.jsonl"
    found.write_text("")
    return found


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


def ended_process() -> int:
    """The number of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def write_owner(path: Path, **changes: object) -> None:
    told = {"pid": os.getpid(), "host": socket.gethostname(), "since": "then", "began": ""}
    lock_path(path).write_text(json.dumps(told | changes))


def test_the_owner_is_named_to_whoever_comes_second(path: Path) -> None:
    with path.open("a") as first, path.open("a") as second:
        lock = hold(first.fileno(), path)
        mine = Owner.read(lock_path(path))
        assert mine is not None
        named = f"process {os.getpid()} on host {socket.gethostname()} since {mine.since}"
        with pytest.raises(LedgerError, match=re.escape(named)):
            hold(second.fileno(), path)
        assert lock_path(path).stat().st_mode & 0o777 == 0o600
        lock.release()
    assert list(path.parent.iterdir()) == [path]


def test_a_name_left_by_a_killed_process_changes_nothing(path: Path) -> None:
    for content in ("", "{", '{"pid": "x"}', json.dumps({"pid": 1, "host": "elsewhere"})):
        lock_path(path).write_text(content)
        with path.open("a") as file:
            hold(file.fileno(), path).release()
        assert not lock_path(path).exists()


def test_a_killed_process_leaves_no_lock(path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from userdp.files.lock import hold\n"
        "path = Path(sys.argv[1]); file = path.open('a'); hold(file.fileno(), path)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    child = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert child.returncode == -9
    assert lock_path(path).exists()
    with path.open("a") as file:
        hold(file.fileno(), path).release()


@pytest.mark.usefixtures("no_locks")
def test_without_locks_of_the_file_system_the_file_is_the_lock(path: Path) -> None:
    with path.open("a") as first, path.open("a") as second:
        lock = hold(first.fileno(), path)
        with pytest.raises(LedgerError, match=f"process {os.getpid()} .* delete that file"):
            hold(second.fileno(), path)
        lock.release()
        hold(second.fileno(), path).release()
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.usefixtures("no_locks")
def test_without_links_the_file_is_the_lock_too(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    test_without_locks_of_the_file_system_the_file_is_the_lock(path)


@pytest.mark.usefixtures("no_locks")
def test_a_lock_of_an_ended_process_is_taken_over_with_a_note(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_owner(path, pid=ended_process())
    with path.open("a") as file, caplog.at_level(logging.WARNING):
        lock = hold(file.fileno(), path)
        assert "has ended: taken over" in caplog.text
        owner = Owner.read(lock_path(path))
        assert owner is not None
        assert owner.pid == os.getpid()
        lock.release()
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.usefixtures("no_locks")
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_later_process_with_the_same_number_is_not_the_owner(path: Path) -> None:
    write_owner(path, began="another boot 1")
    with path.open("a") as file:
        hold(file.fileno(), path).release()


@pytest.mark.usefixtures("no_locks")
def test_a_lock_of_another_host_is_left_alone_and_explained(path: Path) -> None:
    write_owner(path, pid=ended_process(), host="elsewhere")
    before = lock_path(path).read_bytes()
    with path.open("a") as file, pytest.raises(LedgerError, match=r"on host elsewhere .* delete"):
        hold(file.fileno(), path)
    assert lock_path(path).read_bytes() == before


@pytest.mark.usefixtures("no_locks")
def test_a_lock_that_cannot_be_read_is_left_alone(path: Path) -> None:
    lock_path(path).write_text("{")
    with path.open("a") as file, pytest.raises(LedgerError, match="left no name"):
        hold(file.fileno(), path)


def test_a_forked_process_does_not_take_its_parents_name_away(path: Path) -> None:
    with path.open("a") as file:
        lock = hold(file.fileno(), path)
        child = os.fork()
        if not child:
            lock.release()
            os._exit(0)
        os.waitpid(child, 0)
        assert lock_path(path).exists()
        lock.release()
