"""Refuse models in which one user's records can change another user's gradient, or leak past it.

The guarantee clips each user's update as if it depended on that user alone. Statistics over the
batch (BatchNorm), routing with a shared capacity or load-balancing loss (mixtures of experts) break
that, and a tensor written during the forward pass carries data around the noise. What names do not
show, `userdp.probe` finds by trying.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from userdp.errors import InputError, MixedExamplesError

_BATCH_STATISTICS = (nn.modules.batchnorm._BatchNorm,)
# How configurations name their number of experts, at any depth.
_EXPERT_COUNT = re.compile(r"^(moe_)?(num|n)_(\w+_)?experts$|^moe_num_experts$|^ffn_num_experts$")
# How layers that route tokens to experts are named.
_EXPERT_LAYER = re.compile(r"(MoE|Moe|Experts|SparseMLP|TopKRouter|TopkRouter)")


def refuse_mixing(model: nn.Module) -> None:
    """Raise if a layer of the model mixes examples."""
    for name, module in model.named_modules():
        if isinstance(module, _BATCH_STATISTICS):
            raise MixedExamplesError(
                f"{type(module).__name__} at {name!r} computes statistics over the batch, so users "
                "change each other's gradients. Replace it by GroupNorm or LayerNorm."
            )
        if isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d) and (
            module.track_running_stats
        ):
            raise MixedExamplesError(
                f"{type(module).__name__} at {name!r} tracks running statistics, which would leave "
                "the run without noise. Set track_running_stats=False."
            )
    config: Any = getattr(model, "config", None)
    settings = config.to_dict() if hasattr(config, "to_dict") else {}
    for key, experts in _settings(settings):
        if _EXPERT_COUNT.search(key) and isinstance(experts, int) and experts > 1:
            raise _mixture_of_experts(model, f"{key}={experts}")
    for name, module in model.named_modules():
        if _EXPERT_LAYER.search(type(module).__name__):
            raise _mixture_of_experts(model, f"{type(module).__name__} at {name!r}")


def _settings(settings: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting by its name, however deep."""
    if isinstance(settings, dict):
        for name, value in settings.items():
            yield from _settings(value, str(name))
    else:
        yield key, settings


def _mixture_of_experts(model: nn.Module, seen: str) -> MixedExamplesError:
    return MixedExamplesError(
        f"{type(model).__name__} is a mixture of experts ({seen}): routing and its balancing loss "
        "couple the records of a batch. Use a dense model."
    )


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that take part, by name, each tied weight once."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise InputError(
            "the model has no trainable parameter: every requires_grad is False. Unfreeze some, or "
            "add LoRA."
        )
    for name, parameter in found.items():
        if not parameter.is_floating_point():
            raise InputError(f"parameter {name!r} has dtype {parameter.dtype}: not trainable.")
    return found


def check_optimizer(optimizer: torch.optim.Optimizer, trainable: Iterable[Tensor]) -> None:
    """Raise if the optimizer moves anything the private step does not control."""
    known = {id(parameter) for parameter in trainable}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known and (
                parameter.requires_grad or parameter.grad is not None
            ):
                raise InputError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is "
                    "not a trainable parameter of the model: its gradient would bypass clipping "
                    "and noise."
                )


class BufferGuard:
    """Notices writes to what is saved with a model: parameters, frozen ones too, and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # The tensors themselves are kept: a freed one could give its address to its successor.
        self._before = self._saved()

    def changed(self) -> list[str]:
        """The names of tensors that were replaced or written to since."""
        return [
            name
            for name, (tensor, version, values) in self._saved().items()
            if name not in self._before
            or self._before[name][0] is not tensor
            or self._before[name][1:] != (version, values)
        ]

    def check(self) -> None:
        """Raise if a saved tensor was replaced or written to."""
        for name in self.changed():
            raise MixedExamplesError(
                f"{name!r} is written during the forward pass: it would carry records into the "
                "saved model without noise. Freeze or remove it."
            )

    def _saved(self) -> dict[str, tuple[Tensor, int, tuple[int, ...]]]:
        return {
            name: (tensor, tensor._version, _summary(tensor))
            for name, tensor in self._model.state_dict(keep_vars=True).items()
            if isinstance(tensor, Tensor)
        }


def _summary(tensor: Tensor) -> tuple[int, ...]:
    """Numbers that a write changes, also one through `.data`, which torch does not count.

    Taken from the bytes, so that any dtype will do.
    """
    if not tensor.numel():
        return ()
    values = tensor.detach().contiguous().view(-1).view(torch.uint8)
    words = values.view(torch.int32) if len(values) % 4 == 0 else values
    return int(words.sum(dtype=torch.int64)), int(words[::3].sum(dtype=torch.int64))
