"""What a bad input is made of: files in a folder, and a command line.

Every record that is written here holds `TEXT`, and most belong to `USER`. Neither may be printed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

TEXT = "zebracanary"
USER = "quokkacanary"


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What many inputs need and none may change."""

    model: Path
    train: Path
    held_out: Path
    # Records of two owners each.
    owned_by_two: Path
    # A finished run of two steps on `train`.
    run: Path


@dataclass(frozen=True, kw_only=True)
class Place:
    """The folder in which one input is made. It is the current directory of the command."""

    folder: Path
    shared: Shared

    def write(self, name: str, content: str | bytes) -> Path:
        """A file."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def config(self, **sections: str) -> Path:
        """A good training configuration, but for the lines given.

        A line `key = value` replaces the section's line of that key, and `key =` takes it away.
        """
        lines = {
            "data": {
                "store": f"'{self.shared.train}'",
                "sequence_length": "16",
            },
            "model": {"path": f"'{self.shared.model}'"},
            "privacy": {
                "num_users": "20",
                "expected_cohort_size": "5",
                "group_size": "2",
                "epsilon": "8.0",
                "delta": "1e-2",
                "clip_norm": "1.0",
            },
            "training": {"steps": "4", "fixed_seed": "7"},
        }
        for section, given in sections.items():
            for line in given.split("\n"):
                key, _, value = (part.strip() for part in line.partition("="))
                lines[section][key] = value
        text = "".join(
            f"[{section}]\n" + "".join(f"{k} = {v}\n" for k, v in keys.items() if v)
            for section, keys in lines.items()
        )
        return self.write("run.toml", text)


Make = Callable[[Place], Sequence[object]]


@dataclass(frozen=True, kw_only=True)
class Bad:
    """One bad input: `make` writes it and returns the command line; `says` is in the message."""

    name: str
    make: Make
    says: str
    code: int = 2


def record(user: object = USER, text: object = TEXT, **more: object) -> bytes:
    """A line of JSON Lines."""
    return json.dumps({"user": user, "text": text} | more).encode() + b"\n"


GOOD = record("ann") + record("bob") + record("ann")


def imported(name: str, says: str, content: bytes, *options: str, file: str = "data.jsonl") -> Bad:
    """`userdp import` of one file."""

    def make(place: Place) -> Sequence[object]:
        return ("import", place.write(file, content), "--out", "store", *options)

    return Bad(name=name, make=make, says=says)


def trained(name: str, says: str, **sections: str) -> Bad:
    """`userdp train` with one section changed."""
    return Bad(
        name=name,
        make=lambda place: ("train", place.config(**sections), "--out", "run"),
        says=says,
    )


def command(name: str, says: str, *arguments: object, code: int = 2) -> Bad:
    """A command line that needs no file."""
    return Bad(name=name, make=lambda place: arguments, says=says, code=code)
