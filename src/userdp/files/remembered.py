"""What the files of a run remember of its ledger: how many steps, and the hash of a row.

A ledger that was cut off at its end looks like one of a shorter run. The checkpoints beside it know
better, so every reader of a ledger asks them. Whoever lacks the run's key cannot make a checkpoint
say something else; whoever deletes all of them leaves nothing to ask. Before the first checkpoint,
and for the steps after the last one, the sums that are kept say how many steps there were.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from userdp.files.chain import canonical, read_key

CHECKPOINTS = "checkpoints"
# What the sums of a run's steps were, for steps that are taken again. Secret.
SUMS = Path("secret", "sums.jsonl")
MANIFEST = "manifest.json"


def mark(key: bytes, manifest: Mapping[str, Any]) -> str:
    """The owner's mark on the manifest of a checkpoint."""
    content = {name: value for name, value in manifest.items() if name != "mark"}
    return hmac.digest(
        key, b"userdp checkpoint\n" + canonical(content).encode(), hashlib.sha256
    ).hex()


def steps_with_sums(run: Path) -> int:
    """How many steps the run has taken at least: each was charged before its sum was kept."""
    if not (run / SUMS).is_file():
        return 0
    with (run / SUMS).open("rb") as rows:
        found = [re.search(rb'"step": (\d+)', row) for row in rows]
    return max((int(row[1]) + 1 for row in found if row), default=0)


def checkpoint_places(checkpoints: Path) -> list[Path]:
    """The directories of the checkpoints after some step, newest first."""
    return sorted(checkpoints.glob("step-*"), key=lambda path: path.name, reverse=True)


@dataclass(frozen=True)
class Least:
    """What a ledger has at least: `position` is among its rows, and there are `steps` steps."""

    position: tuple[int, str] | None
    steps: int


def least_of(ledger: Path, position: tuple[int, str] | None) -> Least:
    """What the files beside a ledger say; ask before its rows are read, for a run may go on.

    `position` is that of a checkpoint, by default of the newest one.
    """
    run = ledger.parent
    found = position or last_position(run, read_key(ledger))
    return Least(position=found, steps=steps_with_sums(run))


def last_position(run: Path, key: bytes | None) -> tuple[int, str] | None:
    """The number of steps and the hash of the last row, as the newest checkpoint knows them.

    None without a checkpoint that bears the owner's mark.
    """
    for place in checkpoint_places(run / CHECKPOINTS) if key is not None else ():
        try:
            found = cast("dict[str, Any]", json.loads((place / MANIFEST).read_bytes()))
            is_ours = hmac.compare_digest(str(found["mark"]), mark(key or b"", found))
            if is_ours and found["name"] == place.name:
                return int(found["step"]), str(found["head"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            # A damaged one is passed over, here as where weights are read.
            continue
    return None
