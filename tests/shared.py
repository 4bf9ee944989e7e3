"""The folder of shared data and golden numbers beside the project, where it exists."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("USERDP_SHARED", Path(__file__).resolve().parents[2] / "shared"))

needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason="the folder of shared data and golden numbers is not here"
)
