"""In how many bits frozen weights may be kept, and how a model tells its GGUF file, by name."""

from __future__ import annotations

from typing import Literal

Quantisation = Literal["4bit", "8bit"]
# The attribute of a model that names the GGUF file it was read from.
GGUF_FILE = "userdp_gguf_file"
