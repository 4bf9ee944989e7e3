"""The architectures in which tests showed that users do not affect each other.

`tests/probe/test_probe_families.py` builds a small model of each and probes it thoroughly on both
paths, in several sizes. Any other model is judged by the probe alone, and the statement says so.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from userdp.model_settings import FIXED_ROTATIONS

# Values of `model_type` in a model's configuration.
PROVEN = frozenset(
    """
    bloom codegen cohere falcon gemma gemma2 gemma3_text gpt2 gpt_neo gpt_neox gptj granite llama
    mamba mamba2 mistral mpt nemotron olmo olmo2 opt phi phi3 qwen2 qwen3 smollm3 stablelm
    starcoder2 xlstm
    """.split()
)
# Ways to compute attention for which the library has its own function.
ATTENTION = frozenset({"eager", "sdpa", "flash_attention_2"})
_LIBRARIES = frozenset({"torch", "transformers", "peft"})
_SHARDING = frozenset(
    {
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState",
        "userdp.sharding.passes.Passes",
    }
)


def is_proven(model: nn.Module) -> bool:
    """Whether the model is a decoder of a proven architecture, with or without adapters.

    It must be as the libraries made it: no hook of any kind, no replaced `forward`, and no custom
    attention function. At no depth of its settings may a rotation depend on the length.
    """
    inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if inner is None or inner.config.model_type not in PROVEN or not inner.can_generate():
        return False
    if any(global_hooks()) or any(p._backward_hooks for p in model.parameters()):
        return False
    return _is_fixed(inner.config.to_dict()) and all(map(_is_as_it_comes, model.modules()))


def _is_fixed(settings: Any) -> bool:
    """Whether every rotation named in the settings, however deep, is a fixed one."""
    if not isinstance(settings, dict):
        return True
    for name, value in settings.items():
        named = name == "rope_type" or (name == "type" and "factor" in settings)
        if named and value not in FIXED_ROTATIONS:
            return False
    return all(map(_is_fixed, settings.values()))


def _is_as_it_comes(module: nn.Module) -> bool:
    """Whether the module is a library's own, without hooks or a replaced `forward`."""
    if _has_foreign_hooks(module) or "forward" in module.__dict__:
        return False
    kinds: Any = getattr(module, "rope_type", None) or "default"
    if not set(kinds.values() if isinstance(kinds, dict) else [kinds]) <= FIXED_ROTATIONS:
        return False
    if not _has_own_attention(getattr(module, "config", None)):
        return False
    # A method that somebody put into a library's class still names the module it comes from.
    return _is_library(type(module)) and _is_library(type(module).forward)


def _has_foreign_hooks(module: nn.Module) -> bool:
    """Whether anything but torch's sharding, or what runs it, hangs on the module."""
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    hooks: list[Any] = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not _shards(getattr(hook, "__self__", None)) for hook in hooks)


def _shards(owner: Any) -> bool:
    """Whether a hook's owner gathers and frees weights, and changes nothing else."""
    kind = type(owner)
    return f"{kind.__module__}.{kind.__name__}" in _SHARDING


def _has_own_attention(config: Any) -> bool:
    """Whether attention is computed and masked by the library's own functions."""
    name = getattr(config, "_attn_implementation", None) or "eager"
    if name not in ATTENTION:
        return False
    registers: tuple[Any, ...] = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    return all(_is_library(register[name]) for register in registers if name in register)


def _is_library(named: Any) -> bool:
    return str(getattr(named, "__module__", "")).split(".")[0] in _LIBRARIES


def hooks_of(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    """The ids of a module's hooks, by kind. torch never reuses an id."""
    kinds: tuple[Any, ...] = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return tuple(tuple(hooks) for hooks in kinds)


def global_hooks() -> tuple[tuple[int, ...], ...]:
    """The ids of the hooks that torch runs for every module."""
    kinds: tuple[Any, ...] = (
        torch_module._global_forward_hooks,
        torch_module._global_forward_pre_hooks,
        torch_module._global_backward_hooks,
        torch_module._global_backward_pre_hooks,
    )
    return tuple(tuple(hooks) for hooks in kinds)


def ways_of(model: nn.Module) -> list[Any]:
    """How the model computes, as far as a caller may change it: modes, hooks, methods.

    Equal lists mean that nothing has changed in between.
    """
    found: list[Any] = [
        (
            id(module),
            module.training,
            hooks_of(module),
            id(module.__dict__.get("forward")),
            id(type(module).forward),
            getattr(getattr(module, "config", None), "_attn_implementation", None),
        )
        for module in model.modules()
    ]
    return [*found, global_hooks()]


def model_check(model: nn.Module, *, checked: bool = True) -> str:
    """What the statement says about the model: why its users do not affect each other."""
    grounds = ["architecture proven by tests"] if is_proven(model) else []
    if checked:
        grounds.append("checked by probe")
    return ", ".join(grounds)
