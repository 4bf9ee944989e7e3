"""Certified numbers remembered on disk, by everything they depend on.

One small JSON file a number, named by the hash of its key: the event, delta, the adjacency and the
versions of both accountants. The file repeats the whole key, and is used only if it matches. A
cache that cannot be read or written is as good as none. `USERDP_CACHE` names another directory;
"off" switches it off.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from userdp.accounting import events
from userdp.accounting.certificate import Evaluation

FORMAT = 1


def directory() -> Path | None:
    """Where numbers are kept, or None if they are not."""
    chosen = os.environ.get("USERDP_CACHE", "")
    if chosen == "off":
        return None
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "userdp" / "accounting"
    except RuntimeError:  # no home directory
        return None


def remember(
    compute: Callable[[], Evaluation],
    *,
    event: events.DpEvent,
    delta: float,
    adjacency: str,
    versions: str,
) -> Evaluation:
    """`compute()`, or what it gave before for the same parameters and versions."""
    folder = directory()
    if folder is None:
        return compute()
    key = {
        "format": FORMAT,
        "event": events.to_json(event),
        "delta": delta,
        "adjacency": adjacency,
        "versions": versions,
    }
    text = json.dumps(key, sort_keys=True)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    known = _read(path, text)
    if known is not None:
        return known
    result = compute()
    if math.isfinite(result.epsilon) and math.isfinite(result.error_bound):
        _write(path, {"key": text, "value": dataclasses.asdict(result)})
    return result


def _read(path: Path, key: str) -> Evaluation | None:
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if data["key"] != key:
            return None
        return Evaluation(**data["value"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, data: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8"
        ) as file:
            json.dump(data, file)
        os.replace(file.name, path)
    except OSError:
        return
