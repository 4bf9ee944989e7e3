"""One writer at a time for a file, and who it is.

The lock itself is the operating system's (`flock`). It ends with the process that holds it, however
that process ends, so a killed run never stays locked. The file `NAME.lock` beside the locked file
only says who holds it: process, host and since when.

Some network file systems have no such locks. There the file `NAME.lock` is the lock. It may outlive
its owner. If the owner was a process of this host that is gone, the lock is taken over. A process
of another host cannot be seen from here, so its lock is left alone, and the error says what to do.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from userdp.errors import LedgerError
from userdp.files.durable import OWNER_ONLY_FILE

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Who holds a lock. `began` tells a process from a later one with the same number."""

    pid: int
    host: str
    since: str
    began: str

    @staticmethod
    def me() -> Owner:
        """This process."""
        pid = os.getpid()
        since = datetime.now(UTC).isoformat(timespec="seconds")
        return Owner(pid=pid, host=socket.gethostname(), since=since, began=_began(pid) or "")

    @staticmethod
    def read(place: Path) -> Owner | None:
        """The owner that a lock file names; None if it names none that can be read."""
        try:
            told = json.loads(place.read_text(encoding="utf-8"))
            return Owner(
                pid=int(told["pid"]),
                host=str(told["host"]),
                since=str(told["since"]),
                began=str(told["began"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def is_gone(self) -> bool:
        """Whether it was a process of this host that has ended. Of other hosts nothing is known."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            return False
        now = _began(self.pid)
        return now is not None and bool(self.began) and now != self.began

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host} since {self.since}"


class Lock:
    """A lock that is held until `release`. Closing the locked file releases it as well."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._process = os.getpid()

    def release(self) -> None:
        """Take the owner's name away. A forked process does not do it for its parent."""
        if os.getpid() == self._process:
            with contextlib.suppress(OSError):
                self._place.unlink()


def lock_path(path: Path) -> Path:
    """The file that names the owner of the lock on `path`."""
    return path.with_name(f"{path.name}.lock")


def hold(descriptor: int, path: Path) -> Lock:
    """Lock the open file at `path`, so that nobody else writes to it until it is closed."""
    place = lock_path(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LedgerError(_refusal(path, Owner.read(place))) from None
    except OSError:
        return _hold_by_file(path, place)
    with contextlib.suppress(OSError):
        # The file is for people only, so what stands in it after a kill does not matter.
        place.unlink(missing_ok=True)
        _create(place, Owner.me())
    return Lock(place)


def _hold_by_file(path: Path, place: Path) -> Lock:
    """Lock by the existence of a file, where the file system has no locks."""
    for _ in range(2):
        try:
            _create(place, Owner.me())
            return Lock(place)
        except FileExistsError:
            _take_away_if_stale(path, place)
    raise LedgerError(_refusal(path, Owner.read(place)))


def _take_away_if_stale(path: Path, place: Path) -> None:
    owner = Owner.read(place)
    if owner is None or not owner.is_gone:
        way_out = (
            f" This file system has no locks of its own, so {place.name} is the lock. If the "
            "process has ended, delete that file."
        )
        raise LedgerError(_refusal(path, owner) + way_out)
    aside = place.with_name(f"{place.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        place.rename(aside)
        if Owner.read(aside) != owner:
            # Another process was faster and holds the lock now: what was moved is its file.
            aside.rename(place)
            raise LedgerError(_refusal(path, Owner.read(place)))
        aside.unlink()
        _LOG.warning("%s was locked by %s, which has ended: taken over.", path, owner)


def _create(place: Path, owner: Owner) -> None:
    """Make the lock file, whole from the first moment, unless there is one."""
    partial = place.with_name(f".{place.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY_FILE)
    content = json.dumps(asdict(owner)).encode() + b"\n"
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    try:
        # Unlike a rename, a link never replaces a file that is there.
        os.link(partial, place)
    except FileExistsError:
        raise
    except OSError:
        # A file system without links. A kill in between leaves an empty file, which names nobody.
        with place.open("xb") as file:
            file.write(content)
    finally:
        partial.unlink(missing_ok=True)


def _refusal(path: Path, owner: Owner | None) -> str:
    who = str(owner) if owner is not None else "a process that left no name"
    return (
        f"{path} is open already, by {who}: two runs that add rows to one ledger would not count "
        "each other's steps. Wait for that process, or stop it."
    )


def _began(pid: int) -> str | None:
    """When a process of this host began, in the host's own terms; None if it does not tell."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return f"{boot} {after_name.split()[19]}"
