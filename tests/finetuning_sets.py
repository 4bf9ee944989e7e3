"""Made-up rows of records, for the tests of reproductions/finetuning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from userdp.data.tokens import TokenRows


def made_up(seed: int, users: int = 12) -> TokenRows:
    """Users of one to six records of 2 to 20 tokens, cut into rows of 8."""
    rng = np.random.default_rng(seed)
    rows: list[tuple[int, int, np.ndarray]] = []
    record = 0
    for user in range(users):
        for _ in range(rng.integers(1, 7)):
            text = rng.integers(0, 10, size=rng.integers(2, 21))
            pieces = [text[begin : begin + 8] for begin in range(0, len(text), 8)]
            rows += [(user, record, piece) for piece in pieces if len(piece) > 1]
            record += 1
    return TokenRows(
        tokens=np.concatenate([piece for _, _, piece in rows]).astype(np.int32),
        indptr=np.concatenate([[0], np.cumsum([len(piece) for _, _, piece in rows])]),
        owners=np.array([user for user, _, _ in rows]),
        num_users=users,
        records=np.array([number for _, number, _ in rows]),
    )


def write_set(path: Path, *, joined: bool = False) -> None:
    """A set as `prepare` writes it."""
    arrays: dict[str, Any] = {"end": np.int64(0)}
    for name, seed in (("train", 0), ("test", 1)):
        rows = made_up(seed)
        records = np.asarray(rows.records)
        arrays |= {
            f"{name}_tokens": rows.tokens,
            f"{name}_indptr": rows.indptr,
            f"{name}_owners": rows.owners,
            f"{name}_record_of_row": np.zeros_like(records) if joined else records,
            f"{name}_num_users": np.int64(rows.num_users),
        }
    np.savez(path, **arrays)
