"""The names of the tasks: what is learned from a record (`tasks`)."""

from __future__ import annotations

from typing import Literal

TaskName = Literal["causal", "chat", "masked", "classification"]
