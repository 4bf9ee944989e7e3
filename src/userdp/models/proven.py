"""The architectures whose users were shown by tests not to touch each other.

`tests/test_probe_families.py` builds each of them small and probes it thoroughly on both paths, in
several sizes. Any other model is judged by the probe alone, and the statement says so.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

# `model_type` of the configuration.
PROVEN = frozenset(
    """
    bloom codegen cohere falcon gemma gemma2 gemma3_text gpt2 gpt_neo gpt_neox gptj granite llama
    mamba mamba2 mistral mpt nemotron olmo olmo2 opt phi phi3 qwen2 qwen3 smollm3 stablelm
    starcoder2 xlstm
    """.split()
)
# Ways to turn positions into angles in which no position depends on how many there are.
FIXED_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn", "proportional"})


def is_proven(model: nn.Module) -> bool:
    """Whether the model is a decoder of a proven architecture, with or without adapters."""
    inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if inner is None or inner.config.model_type not in PROVEN or not inner.can_generate():
        return False
    rotation: Any = getattr(inner.config, "rope_parameters", None) or {}
    return rotation.get("rope_type", "default") in FIXED_ROTATIONS


def model_check(model: nn.Module, *, checked: bool = True) -> str:
    """What the statement says of the model: on what grounds its users are apart."""
    grounds = ["architecture proven by tests"] if is_proven(model) else []
    if checked:
        grounds.append("checked by probe")
    return ", ".join(grounds)
