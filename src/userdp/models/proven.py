"""The architectures in which tests showed that users do not affect each other.

`tests/test_probe_families.py` builds a small model of each and probes it thoroughly on both paths,
in several sizes. Any other model is judged by the probe alone, and the statement says so.
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
# Rotary embeddings in which a position's angle does not depend on the sequence length.
FIXED_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn", "proportional"})


def is_proven(model: nn.Module) -> bool:
    """Whether the model is a decoder of a proven architecture, with or without adapters."""
    inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if inner is None or inner.config.model_type not in PROVEN or not inner.can_generate():
        return False
    rotation: Any = getattr(inner.config, "rope_parameters", None) or {}
    fixed = rotation.get("rope_type", "default") in FIXED_ROTATIONS
    return fixed and all(map(_is_as_it_comes, model.modules()))


def _is_as_it_comes(module: nn.Module) -> bool:
    """Whether the module comes from a known library and has no hooks or replaced `forward`."""
    changed = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    library = type(module).__module__.split(".")[0]
    return not changed and library in {"torch", "transformers", "peft"}


def model_check(model: nn.Module, *, checked: bool = True) -> str:
    """What the statement says about the model: why its users do not affect each other."""
    grounds = ["architecture proven by tests"] if is_proven(model) else []
    if checked:
        grounds.append("checked by probe")
    return ", ".join(grounds)
