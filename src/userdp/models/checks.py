"""Refuses models in which users' records mix, or reach the saved model without noise.

Clipping assumes that each user's update depends on that user alone. Statistics over the batch
(BatchNorm) break this, and so do mixtures of experts: their routing shares a capacity or a
balancing loss. A tensor that is written during the forward pass carries data past the noise. These
checks go by names and types. `userdp.probe.verify` finds the rest by trying.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from userdp.errors import InputError, MixedExamplesError
from userdp.model_settings import every_setting
from userdp.models.quantised import quantisation_of, refuse_shared_outliers
from userdp.sharded_tensors import local_of

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_BATCH_STATISTICS = (nn.modules.batchnorm._BatchNorm,)
# Names of the number of experts in configurations, at any depth.
_EXPERT_COUNT = re.compile(r"^(moe_)?(num|n)_(\w+_)?experts$|^moe_num_experts$|^ffn_num_experts$")
# Names of layers that route tokens to experts.
_EXPERT_LAYER = re.compile(r"(MoE|Moe|Experts|SparseMLP|TopKRouter|TopkRouter)")

# What says in a name of transformers that a module or a weight belongs to experts.
_NAMED_FOR_EXPERTS = re.compile(r"expert|router|moe", re.IGNORECASE)
_LIBRARIES = frozenset({"torch", "transformers", "peft"})


def refuse_mixing(model: nn.Module) -> None:
    """Raise if a layer of the model mixes examples."""
    for name, module in model.named_modules():
        if isinstance(module, _WRAPPERS):
            raise InputError(
                f"{type(module).__name__} adds up gradients over processes or devices before "
                "anybody is clipped: give the model itself (its `.module`). Under torchrun every "
                "process then takes its own users, and nothing else changes."
            )
        refuse_shared_outliers(name, module)
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
    for key, experts in () if _has_no_experts(model) else every_setting(settings):
        if _EXPERT_COUNT.search(key) and isinstance(experts, int) and experts > 1:
            raise _mixture_of_experts(model, f"{key}={experts}")
    for name, module in model.named_modules():
        if _EXPERT_LAYER.search(type(module).__name__):
            raise _mixture_of_experts(model, f"{type(module).__name__} at {name!r}")


def _has_no_experts(model: nn.Module) -> bool:
    """Whether `transformers` made the model, and nothing in it is named for experts.

    The settings of a dense model may have a number of experts, too (Doge, DeepSeek V3 in its first
    layers). Of other modules nobody knows how they name theirs.
    """
    kinds = {type(module) for module in model.modules()}
    names = [part for name, _ in model.named_modules() for part in name.split(".")]
    names += [name for name, _ in model.named_parameters()] + [kind.__name__ for kind in kinds]
    is_theirs = any(issubclass(kind, PreTrainedModel) for kind in kinds)
    is_theirs = is_theirs and all(kind.__module__.split(".")[0] in _LIBRARIES for kind in kinds)
    return is_theirs and not any(map(_NAMED_FOR_EXPERTS.search, names))


def _mixture_of_experts(model: nn.Module, seen: str) -> MixedExamplesError:
    return MixedExamplesError(
        f"{type(model).__name__} is a mixture of experts ({seen}): routing and its balancing loss "
        "couple the records of a batch. Use a dense model."
    )


def input_embedding(model: nn.Module) -> Any:
    """The table of the model's tokens; None if it has none.

    CANINE hashes characters instead, and `transformers` raises an error.
    """
    find: Any = getattr(model, "get_input_embeddings", None)
    try:
        return None if find is None else find()
    except NotImplementedError:
        return None


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters to train, by name. A tied weight appears once."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise InputError(
            "the model has no trainable parameter: every requires_grad is False. Unfreeze some, or "
            "add LoRA."
        )
    bits = quantisation_of(model)
    if bits is not None and not hasattr(model, "peft_config"):
        raise InputError(
            f"the model's weights are frozen in {bits[0]} bits, so it cannot be trained as a "
            "whole: add LoRA, or load it without quantize."
        )
    for name, parameter in found.items():
        if not parameter.is_floating_point():
            raise InputError(f"parameter {name!r} has dtype {parameter.dtype}: not trainable.")
    return found


def check_optimizer(optimizer: torch.optim.Optimizer, trainable: Iterable[Tensor]) -> None:
    """Raise if the optimizer changes anything that the private step does not control."""
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
    """Notices writes to what is saved with a model: buffers and parameters, frozen ones too.

    It also notices changes of what modules save as their extra state.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # The tensors themselves are kept, because a new tensor could reuse a freed one's address.
        self._before = self._saved()

    def changed(self, *, values_only: bool = False) -> list[str]:
        """The names of what has changed since, was replaced or was written to.

        With `values_only`, only changed values count.
        """
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
        """Raise if something that is saved with the model has changed (see `changed`)."""
        for name in self.changed(values_only=values_only):
            raise MixedExamplesError(
                f"{name!r} is written during {during}: it would carry records into the saved model "
                "without noise. Freeze or remove it."
            )

    def _saved(self) -> dict[str, tuple[Tensor | None, int, Any]]:
        held = {id(tensor) for tensor in (*self._model.parameters(), *self._model.buffers())}

        def noted(value: Any) -> tuple[Tensor | None, int, Any]:
            if not isinstance(value, Tensor):
                return None, 0, extra_state_bytes(value)
            # What a module makes for saving alone is a new tensor each time (quantised layers).
            if id(value) not in held:
                return None, 0, _summary(value)
            return value, value._version, _summary(value)

        saved = self._model.state_dict(keep_vars=True)
        return {name: noted(value) for name, value in saved.items()}


class _Pickler(pickle.Pickler):
    """Writes a summary instead of each tensor, because torch's own bytes contain addresses."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return str((obj.dtype, tuple(obj.shape), _summary(obj)))
        return None


def extra_state_bytes(value: Any) -> bytes:
    """The result of a module's `get_extra_state`, as bytes that change with it."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _summary(tensor: Tensor) -> tuple[int, ...]:
    """Numbers that change with a write, even with one through `.data`, which torch does not count.

    They are computed from the bytes, so any dtype will do.
    """
    if not local_of(tensor).numel():
        return ()
    values = local_of(tensor.detach()).contiguous().view(-1).view(torch.uint8)
    words = values.view(torch.int32) if len(values) % 4 == 0 else values
    return int(words.sum(dtype=torch.int64)), int(words[::3].sum(dtype=torch.int64))
