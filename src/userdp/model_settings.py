"""Reads the settings that a model came with, at any depth, and knows which rotations are safe.

Two questions are answered from them alone: whether the architecture is proven, and whether records
may share a row. For both the rotations must be fixed, so the list of these stands here, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Rotary embeddings in which a position's angle does not depend on how long the row is.
FIXED_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn", "proportional"})


def every_setting(settings: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting and its name, at any depth.

    >>> dict(every_setting({"layers": 2, "text": {"experts": 4}}))["experts"]
    4
    """
    yield key, settings
    if isinstance(settings, dict):
        for name, value in settings.items():
            yield from every_setting(value, str(name))
