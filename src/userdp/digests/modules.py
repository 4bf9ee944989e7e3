"""What a model and an optimizer consist of beside their tensors, as lists of values and code.

`described` makes plain data of it. Public: all of this is settings and code.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from userdp.digests.code import bound_by
from userdp.digests.values import kind_of, plain_attributes

# What every module of torch holds. It is described elsewhere.
_OF_MODULES = frozenset(vars(nn.Module()))
# The same of optimizers. The last one is set when a schedule is there and a step was taken.
_OF_OPTIMIZERS = frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=1.0))) - {"defaults"}
_OF_OPTIMIZERS |= {"_opt_called"}
# Whether adapters take part: of a library's private settings the only ones that people change.
_OF_ADAPTERS = ("_active_adapter", "_disable_adapters")
# Where a model was read from, under the names that its configuration and the model have for it.
_PLACES = ("_name_or_path", "name_or_path")
_WHEN = ("pre", "post")


def model_parts(model: nn.Module) -> list[Any]:
    """The configuration, and of every module the class, what it holds, the hooks and attention."""
    config = _settings(getattr(model, "config", None))
    modules = [
        [
            name,
            type(module),
            _attributes(module),
            _hooks(module),
            _attention(getattr(module, "config", None)),
            script_of(module),
        ]
        for name, module in model.named_modules()
    ]
    # An object that says its address says another one in each process.
    words = re.sub(r" at 0x[0-9a-f]+", "", str(model))
    return [kind_of(model), words, config, modules, _global_hooks()]


def optimizer_parts(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The class, the settings and the state, and all that the object holds beside them."""
    held = {name: entry for name, entry in vars(optimizer).items() if name not in _OF_OPTIMIZERS}
    hooks = [vars(optimizer).get(f"_optimizer_step_{when}_hooks", {}) for when in _WHEN]
    # The hooks that torch runs for every optimizer.
    hooks += [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    hooked = [list(entry.values()) for entry in hooks]
    return [type(optimizer), optimizer.state_dict(), dict(sorted(held.items())), hooked]


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What a module holds beside its own tensors and modules.

    The settings of a library's module do not count, because the model's configuration says them.
    Neither does anything with a private name, unless it is code, a tensor, or one's own.
    """
    held = {
        name: _settings(entry) if hasattr(entry, "to_dict") else entry
        for name, entry in sorted(vars(module).items())
        if name not in _OF_MODULES and name not in _PLACES
    }
    if bound_by(str(type(module).__module__)) is None:
        return held
    return plain_attributes(module, but=("training",)) | {
        name: entry for name, entry in held.items() if name in _OF_ADAPTERS or _computes(entry)
    }


def _settings(config: Any) -> dict[str, Any]:
    """A configuration, but for where it was read from."""
    to_dict = getattr(config, "to_dict", dict)
    return {name: value for name, value in to_dict().items() if name not in _PLACES}


def _computes(value: Any) -> bool:
    """Whether a value may decide what a library's module computes: code, tensors, own objects."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        return any(map(_computes, entries.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_computes, cast("Collection[Any]", value)))
    is_own = bound_by(str(type(value).__module__)) is None
    return callable(value) or isinstance(value, Tensor) or is_own


def script_of(value: Any) -> str:
    """The code of what torch.jit made of a module or a function; empty for everything else."""
    is_script = isinstance(value, torch.jit.ScriptModule | torch.jit.ScriptFunction)
    return str(getattr(value, "code", "")) if is_script else ""


def _attention(config: Any) -> list[Any]:
    """How attention is computed and masked: its name, and the functions of that name."""
    name = getattr(config, "_attn_implementation", None)
    registers: tuple[Any, ...] = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    return [name, *(register[name] for register in registers if name in register)]


def _global_hooks() -> list[Any]:
    """The hooks that torch runs for every module."""
    kinds: tuple[Any, ...] = (
        torch_module._global_forward_hooks,
        torch_module._global_forward_pre_hooks,
        torch_module._global_backward_hooks,
        torch_module._global_backward_pre_hooks,
    )
    return [list(hooks.values()) for hooks in kinds]


def _hooks(module: nn.Module) -> list[Any]:
    kinds: tuple[Any, ...] = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return [list(hooks.values()) for hooks in kinds]
