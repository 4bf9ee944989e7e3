"""Refuse models in which one user's records can change another user's gradient, or leak past it.

The guarantee clips each user's update as if it depended on that user alone. Statistics over the
batch (BatchNorm), routing with a shared capacity or load-balancing loss (mixtures of experts) break
that, and a tensor written during the forward pass carries data around the noise. What names do not
show, `userdp.probe` finds by trying.
"""

from __future__ import annotations

import io
import pickle
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
    """Notices writes to what is saved with a model: parameters, frozen ones too, and buffers.

    So it does to what modules save as their extra state.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # The tensors themselves are kept: a freed one could give its address to its successor.
        self._before = self._saved()

    def changed(self, *, values_only: bool = False) -> list[str]:
        """The names of what was replaced or written to since, or has other values."""
        found: list[str] = []
        for name, (tensor, version, values) in self._saved().items():
            before = self._before.get(name)
            is_same = before is not None and before[2] == values
            if before is not None and is_same and not values_only:
                is_same = before[0] is tensor and before[1] == version
            if not is_same:
                found.append(name)
        return found

    def check(self, during: str = "the forward pass", *, values_only: bool = False) -> None:
        """Raise if something that is saved was replaced or written to."""
        for name in self.changed(values_only=values_only):
            raise MixedExamplesError(
                f"{name!r} is written during {during}: it would carry records into the saved model "
                "without noise. Freeze or remove it."
            )

    def _saved(self) -> dict[str, tuple[Tensor | None, int, Any]]:
        return {
            name: (value, value._version, _summary(value))
            if isinstance(value, Tensor)
            else (None, 0, extra_state_bytes(value))
            for name, value in self._model.state_dict(keep_vars=True).items()
        }


class _Pickler(pickle.Pickler):
    """Writes tensors as what tells whether they changed: torch's own bytes hold addresses."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return str((obj.dtype, tuple(obj.shape), _summary(obj)))
        return None


def extra_state_bytes(value: Any) -> bytes:
    """What a module's `get_extra_state` gives, as bytes that change with it."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _summary(tensor: Tensor) -> tuple[int, ...]:
    """Numbers that a write changes, also one through `.data`, which torch does not count.

    Taken from the bytes, so that any dtype will do.
    """
    if not tensor.numel():
        return ()
    values = tensor.detach().contiguous().view(-1).view(torch.uint8)
    words = values.view(torch.int32) if len(values) % 4 == 0 else values
    return int(words.sum(dtype=torch.int64)), int(words[::3].sum(dtype=torch.int64))
