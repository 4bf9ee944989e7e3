"""Commit messages of a git repository, owned by everyone they name.

Owners are the author, the committer, and the people in lines such as Co-authored-by, Signed-off-by,
Reviewed-by, Acked-by, Tested-by, Reported-by, Helped-by and Suggested-by, in this order. Each is
named by mail address in lower case. The repository's `.mailmap` applies to authors and committers.
The text is the message without these lines. Merges are left out, because machines write most of
their messages.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from userdp.data.importers.bounded import MAX_LINE_BYTES
from userdp.data.importers.mail import is_list_address
from userdp.data.record import Record, Skipped
from userdp.errors import InputError

TRAILER = re.compile(
    r"^\s*(co-authored|signed-off|reviewed|acked|tested|reported|helped|suggested|co-developed)-by:"
    r"\s*(?P<who>.*)$",
    re.IGNORECASE,
)
OTHER_TRAILER = re.compile(r"^\s*(cc|change-id|git-svn-id|fixes|link|closes):\s", re.IGNORECASE)
ADDRESS = re.compile(r"[^\s<>()\[\]:,;\"']+@[^\s<>()\[\]:,;\"']+")

FIELDS = "%at%x1f%aE%x1f%cE%x1f%B"
PIECE_BYTES = 2**16


def records(repository: Path) -> Iterator[Record | Skipped]:
    """One record for each commit, oldest first."""
    command = [
        "git",
        "--no-pager",
        # The repository may belong to someone else. Reading its log runs none of its code.
        *("-c", "safe.directory=*", "-c", "log.showSignature=false"),
        *("-C", str(repository), "log", "-z", "--no-merges", "--date-order", "--reverse"),
        *("--encoding=UTF-8", "--no-color", f"--format={FIELDS}"),
    ]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except FileNotFoundError:
        raise InputError("importing a git repository needs the program `git`.") from None
    assert process.stdout is not None
    rest = b""
    number = 0
    try:
        while piece := process.stdout.read(PIECE_BYTES):
            *commits, rest = (rest + piece).split(b"\x00")
            if len(rest) > MAX_LINE_BYTES:
                raise InputError(f"{repository.name}, commit {number + 1}: message above 32 MiB.")
            for commit in commits:
                number += 1
                yield _record(commit, f"{repository.name}, commit {number}")
        if rest.strip():
            yield _record(rest, f"{repository.name}, commit {number + 1}")
        if process.wait() != 0:
            raise InputError(f"{repository}: git cannot read its history.")
    finally:
        process.stdout.close()
        process.kill()
        process.wait()


def _record(commit: bytes, where: str) -> Record | Skipped:
    time, author, committer, message = commit.decode("utf-8", "replace").split("\x1f", 3)
    owners: dict[str, None] = {}
    kept: list[str] = []
    for address in (author, committer):
        _add_owner(owners, address)
    for line in message.splitlines():
        trailer = TRAILER.match(line)
        if trailer:
            for address in ADDRESS.findall(trailer["who"])[:1]:
                _add_owner(owners, address)
        elif not OTHER_TRAILER.match(line):
            kept.append(line.rstrip())
    if not owners:
        return Skipped("no author address")
    text = ADDRESS.sub("<email>", "\n".join(kept).strip())
    if not text:
        return Skipped("empty text")
    return Record(text=text, owners=tuple(owners), where=where, time=int(time))


def _add_owner(owners: dict[str, None], address: str) -> None:
    cleaned = address.strip().strip("<>").lower()
    if cleaned and not is_list_address(cleaned):
        owners.setdefault(cleaned)
