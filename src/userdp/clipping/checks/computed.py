"""Refuse layers that compute their weights: DoRA, weight norm and other parametrizations.

The rules of the fast path start from the input of a layer and the gradient of its output. If the
weight is itself computed, for instance from a direction and a length, they would miss that step.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from userdp.errors import PLAIN, InputError


def refuse_computed_weights(model: nn.Module) -> None:
    """Raise if a layer computes its weight from trainable parameters whenever it is called.

    The fast path needs layers that hold their weights. The plain path can train any layer.
    """
    for name, module in model.named_modules():
        kind = _computed_by(module)
        if kind:
            raise InputError(
                f"{type(module).__name__} at {name!r} computes its weight with {kind}, which the "
                f"fast path cannot clip. Use {PLAIN}, or remove it from the layer."
            )


def _computed_by(module: nn.Module) -> str:
    """How a layer computes its weight from trainable parameters; empty if it does not."""
    magnitude = getattr(module, "lora_magnitude_vector", None)
    if isinstance(magnitude, nn.Module) and _is_trained(magnitude):
        return "DoRA (use_dora=True)"
    if parametrize.is_parametrized(module):
        lists: Any = module.parametrizations
        for parametrizations in lists.values():
            if _is_trained(parametrizations):
                return f"the parametrization {type(parametrizations[0]).__name__.lstrip('_')}"
    if _is_trained(module, recurse=False):
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm | SpectralNorm):
                return f"{type(hook).__name__} (torch.nn.utils)"
    return ""


def _is_trained(module: nn.Module, *, recurse: bool = True) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters(recurse))
