"""In how many bits frozen weights may be kept, by name."""

from __future__ import annotations

from typing import Literal

Quantisation = Literal["4bit", "8bit"]
