"""Where the reference data of the project lies, for tests that need it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("USERDP_SHARED", Path(__file__).resolve().parents[2] / "shared"))

needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"reference data not found at {SHARED}; set USERDP_SHARED"
)
