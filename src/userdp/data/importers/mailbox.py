"""Mailboxes: mbox files, plain or gzipped, maildirs, and trees of single messages such as Enron's.

Messages are read one at a time. A message above `MAX_MESSAGE_BYTES` is skipped and counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from userdp.data.importers.bounded import MAX_LINE_BYTES, lines
from userdp.data.importers.mail import MailRules, record_of
from userdp.data.record import Record, Skipped
from userdp.errors import InputError

MAX_MESSAGE_BYTES = MAX_LINE_BYTES

HEADER = re.compile(rb"^[!-9;-~]+:")
DATED = re.compile(rb"\d\d:\d\d(:\d\d)?.*\d{4}")
QUOTED_FROM = re.compile(rb"^>+From ")


def mbox_records(path: Path, rules: MailRules) -> Iterator[Record | Skipped]:
    """The messages of an mbox file, in order.

    A line "From ..." after an empty line begins a message if it has a date or a header follows it.
    Without an empty line before it, both are needed. In bodies such lines are quoted (mboxo,
    mboxrd); one level of quoting is removed.
    """
    message: list[bytes] = []
    started = 0
    size = 0
    pending: tuple[int, bytes, bool] | None = None
    after_blank = True

    def finish() -> Iterator[Record | Skipped]:
        if started:
            if size > MAX_MESSAGE_BYTES:
                yield Skipped("message above 32 MiB")
            else:
                yield record_of(b"".join(message), f"{path.name}, line {started}", rules)

    for number, line in lines(path):
        if pending is not None:
            from_line_number, from_line, from_after_blank = pending
            pending = None
            begins = (
                DATED.search(from_line) or HEADER.match(line)
                if from_after_blank
                else HEADER.match(line)
            )
            if begins:
                yield from finish()
                message, size, started = [], 0, from_line_number
            elif started:
                message.append(from_line)
                after_blank = False
        if line.startswith(b"From ") and (after_blank or DATED.search(line)):
            pending = (number, line, after_blank)
            after_blank = False
            continue
        after_blank = line in (b"\n", b"\r\n")
        if not started:
            if line.isspace() or line == b"\xef\xbb\xbf\n":
                continue
            raise InputError(
                f"{path.name}, line {number}: not an mbox: it does not begin with a line 'From '."
            )
        size += len(line)
        if size <= MAX_MESSAGE_BYTES:
            message.append(line[1:] if QUOTED_FROM.match(line) else line)
    if pending is not None and started:
        message.append(pending[1])
    elif pending is not None:
        raise InputError(f"{path.name}, line {pending[0]}: not an mbox: no message follows.")
    yield from finish()


def tree_records(root: Path, rules: MailRules) -> Iterator[Record | Skipped]:
    """The messages of a maildir, of any tree of files that hold one message each, or of one file.

    In a maildir, `cur` and `new` are read and `tmp` is not. Links are not followed, because they
    could lead out of the tree.
    """
    for path in [root] if root.is_file() else sorted(root.rglob("*")):
        if path.is_symlink() or not path.is_file() or _is_bookkeeping(path, root):
            continue
        if path.stat().st_size > MAX_MESSAGE_BYTES:
            yield Skipped("message above 32 MiB")
            continue
        raw = path.read_bytes()
        if not HEADER.match(raw.lstrip(b"\r\n")) and not raw.startswith(b"From "):
            yield Skipped("not a message")
            continue
        if raw.startswith(b"From "):
            raw = raw.partition(b"\n")[2]
        # In a tree such as Enron's, folders are people's names. Only the file's name is shown.
        yield record_of(raw, f"{root.name}/{path.name}, line 1", rules)


def _is_bookkeeping(path: Path, root: Path) -> bool:
    if path == root:
        return False
    parts = path.relative_to(root).parts
    return "tmp" in parts[:-1] or parts[-1].startswith(("dovecot", "maildirfolder", ".", "courier"))
