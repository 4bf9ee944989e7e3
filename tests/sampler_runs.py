"""Runs of six steps with a sampler: what they say, and what is left of one that was killed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any


def plan_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "ledger.jsonl").read_text().splitlines()[0])["plan"]


def stated(run: Path) -> float:
    """The price of the run. Nothing is promised under a fixed seed."""
    found = json.loads((run / "statement.json").read_text())
    assert not found["guarantee"]
    return found["planned_epsilon"]


def weights(run: Path) -> bytes:
    (file,) = (run / "model").glob("*.safetensors")
    return file.read_bytes()


def stop_after_four_steps(run: Path) -> None:
    """The run as if it had been killed in its fifth step: its last checkpoint is the fourth's."""
    for name in ("model", "checkpoints/step-000000006"):
        shutil.rmtree(run / name)
    for name in ("statement.json", "report.html", "MODEL_CARD.md"):
        (run / name).unlink(missing_ok=True)
    ledger = run / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-2]))
