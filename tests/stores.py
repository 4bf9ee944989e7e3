"""Records of random words for small stores (a helper, not a test)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import models_zoo
from userdp.data.record import Record

# One key for all stores of the tests, so that their users can be compared.
KEY = bytes(range(32))


def sentences(*, users: int, records_per_user: int, seed: int, prefix: str) -> list[Record]:
    """Records of random known words."""
    rng = np.random.default_rng(seed)
    return [
        Record(
            " ".join(rng.choice(models_zoo.WORDS, size=int(rng.integers(3, 9)))),
            (f"{prefix}{user}",),
            f"record {number} of {prefix}{user}",
        )
        for user in range(users)
        for number in range(records_per_user)
    ]


def write_lines(path: Path) -> Path:
    """Write 80 JSON lines of 10 users, each text twice."""
    path.write_text(
        "".join(
            json.dumps({"user": f"u{i % 10}", "text": f"some words of text {i % 40}"}) + "\n"
            for i in range(80)
        )
    )
    return path
