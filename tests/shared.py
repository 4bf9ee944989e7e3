"""The folder of real data that some tests read; it is not part of the project."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("USERDP_SHARED", Path(__file__).resolve().parents[2] / "shared"))
needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"the data folder {SHARED.name!r} is not beside the project"
)
