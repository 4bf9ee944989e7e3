"""The files in which each rank of a sharded run left its rows, read back as whole tensors.

They are safetensors, in torch.distributed.checkpoint's way of naming rows (`sharding.saved`).
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WEIGHTS, STATE = "weights.", "state."


def load_shards(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights, and the tensors of the state, whole and by name. No other rank takes part."""
    checkpoint: Any = importlib.import_module("torch.distributed.checkpoint")

    reader = checkpoint.HuggingFaceStorageReader(str(path))
    known: dict[str, Any] = reader.read_metadata().state_dict_metadata
    found = {
        name: torch.empty(about.size, dtype=about.properties.dtype) for name, about in known.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        reader = checkpoint.HuggingFaceStorageReader(str(path))
        checkpoint.load(found, storage_reader=reader, no_dist=True)
    return _named(found, WEIGHTS), _named(found, STATE)


def _named(found: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in found.items()
        if name.startswith(prefix)
    }
