"""What the checkpoints of a run remember of its ledger: how many steps, and the hash of a row.

A ledger that was cut off at its end looks like one of a shorter run. The checkpoints beside it know
better, so every reader of a ledger asks them. Whoever lacks the run's key cannot make a checkpoint
say something else; whoever deletes all of them leaves nothing to ask.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from userdp.files.chain import canonical

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


def checkpoint_places(checkpoints: Path) -> list[Path]:
    """The directories of the checkpoints after some step, newest first."""
    return sorted(checkpoints.glob("step-*"), key=lambda path: path.name, reverse=True)


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
