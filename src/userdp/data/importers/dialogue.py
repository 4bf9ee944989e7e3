"""Plays, transcripts and chat logs as plain text. Each turn is a record, owned by its speaker.

There are two layouts, and the first line shows which one it is:

    Ann:                      Ann: What shall we do?
    What shall we do?         Bob: Nothing.

    Bob:
    Nothing.

On the left, a turn begins after an empty line, with the speaker alone on a line. On the right,
every line that begins with a short name and a colon begins a turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from userdp.data.importers.bounded import lines
from userdp.data.record import Record, Skipped
from userdp.errors import InputError

ALONE = re.compile(r"^(?P<name>[^:]{1,80}):$")
INLINE = re.compile(r"^(?:\[[^\]]{1,40}\]\s*)?(?P<name>[^\s:][^:]{0,60}?)\s?:\s+(?P<text>\S.*)$")
MAX_NAME_WORDS = 5


def records(path: Path) -> Iterator[Record | Skipped]:
    """The turns of a file, in order."""
    speaker: str | None = None
    turn: list[str] = []
    began = 1
    alone: bool | None = None
    after_blank = True

    def finish() -> Iterator[Record | Skipped]:
        if speaker is None:
            return
        text = "\n".join(turn).strip()
        if text:
            yield Record(text=text, owners=(speaker,), where=f"{path.name}, line {began}")
        else:
            yield Skipped("empty text")

    for number, line in _decoded(path):
        if alone is None and line.strip():
            alone = ALONE.match(line) is not None
            if not alone and INLINE.match(line) is None:
                raise InputError(
                    f"{path.name}, line {number}: no speaker: a dialogue begins with 'Name:'."
                )
        found = ALONE.match(line) if alone and after_blank else None
        if alone is False:
            found = INLINE.match(line)
            if found and len(found["name"].split()) > MAX_NAME_WORDS:
                found = None
        if found:
            yield from finish()
            speaker, began = found["name"].strip(), number
            turn = [] if alone else [found["text"]]
        else:
            turn.append(line)
        after_blank = not line.strip()
    yield from finish()


def _decoded(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in lines(path):
        if b"\x00" in line:
            raise InputError(f"{path.name}, line {number}: contains a NUL byte.")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise InputError(f"{path.name}, line {number}: not valid UTF-8.") from None
        yield number, text.rstrip("\r\n")
