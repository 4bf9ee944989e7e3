"""Which layers of a model hold trainable weights, which rule each gets, and how they are called.

The answers come from the model's modules and from one tiny forward pass that is looked at and
thrown away; the model itself stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from userdp.clipping.any_layer import AnyLayer
from userdp.clipping.layers import Embedding, LayerNorm, Product, RmsNorm
from userdp.clipping.merged_lora import MergedLora
from userdp.clipping.recurrent import Lstm
from userdp.errors import MixedExamplesError

LayerRule = type[Product | LayerNorm | RmsNorm | Embedding | Lstm | MergedLora | AnyLayer]

# Rows in the tiny forward pass: two, so that a dimension of one is known to be shared by rows.
TRIAL_ROWS = 2


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A module of the model with its rule and its trainable parameters, by the module's names."""

    name: str
    module: nn.Module
    rule: LayerRule
    parameters: dict[str, nn.Parameter]


@dataclass(frozen=True, kw_only=True)
class Called:
    """How a module was called on `TRIAL_ROWS` rows: how often, on what, and who else read that."""

    times: int
    input_shape: tuple[int, ...]
    same_input: int


@dataclass(frozen=True, kw_only=True)
class Survey:
    """A model's layers, how each is called on rows of one shape, and what is clipped together."""

    layers: list[Layer]
    called: dict[nn.Module, Called]
    groups: dict[int, int]


def survey(
    model: nn.Module,
    row: Mapping[str, Tensor],
    forward: Callable[[Mapping[str, Tensor]], Any],
    *,
    merge_lora: bool = False,
) -> Survey:
    """Look at the model while `forward` runs on copies of one row; raise if rows cannot be told."""
    layers = find_layers(model, merge_lora=merge_lora)
    trial = {name: tensor[:1].repeat_interleave(TRIAL_ROWS, 0) for name, tensor in row.items()}
    called = look(layers, lambda: forward(trial))
    layers = [layer for layer in layers if layer.module in called]
    for layer in layers:
        check_rows(layer, called[layer.module])
    # Merging must not change what is clipped with what.
    return Survey(layers=layers, called=called, groups=clip_groups(find_layers(model)))


def find_layers(model: nn.Module, *, merge_lora: bool = False) -> list[Layer]:
    """Every module that owns trainable parameters, with its rule; one without gets `AnyLayer`.

    With `merge_lora`, a plain LoRA layer is one layer instead of two thin ones.
    """
    found: list[Layer] = []
    leaf_owned = {
        id(parameter)
        for module in model.modules()
        if not any(module.children())
        for parameter in module._parameters.values()
    }

    def visit(name: str, module: nn.Module) -> None:
        if merge_lora and MergedLora.describes(module):
            weights = dict(module.named_parameters())
            adapters = {own: weights[own] for own in MergedLora.names(module)}
            found.append(Layer(name=name, module=module, rule=MergedLora, parameters=adapters))
            return
        own = [p for p in module._parameters.values() if p is not None and p.requires_grad]
        # A module may list a weight that one of its layers uses (BERT's head lists the bias of its
        # decoder): the layer's rule then covers it.
        if not own or (any(module.children()) and all(id(p) in leaf_owned for p in own)):
            for child_name, child in module.named_children():
                visit(f"{name}.{child_name}" if name else child_name, child)
            return
        parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        found.append(Layer(name=name, module=module, rule=_rule_for(module), parameters=parameters))

    visit("", model)
    # A module that sits in two places is one layer.
    return list({id(layer.module): layer for layer in reversed(found)}.values())[::-1]


def clip_groups(layers: list[Layer]) -> dict[int, int]:
    """Parameter (by id) -> the number of the layer it is clipped with; shared ones the first's."""
    group: dict[int, int] = {}
    for layer in layers:
        number = max(group.values(), default=-1) + 1
        for parameter in layer.parameters.values():
            group.setdefault(id(parameter), number)
    return group


def _rule_for(module: nn.Module) -> LayerRule:
    if type(module) in (nn.Linear, Conv1D):
        return Product
    if type(module) is nn.LayerNorm and len(module.normalized_shape) == 1:
        return LayerNorm
    if type(module) is nn.Embedding:
        plain = module.max_norm is None and not (module.scale_grad_by_freq or module.sparse)
        return Embedding if plain else AnyLayer
    if Lstm.describes(module):
        return Lstm
    if RmsNorm.describes(module):
        return RmsNorm
    return AnyLayer


def look(layers: list[Layer], forward: Callable[[], Any]) -> dict[nn.Module, Called]:
    """How each layer is called in `forward`, a pass over `TRIAL_ROWS` rows."""
    times: dict[nn.Module, int] = {}
    inputs: dict[nn.Module, Any] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        times[module] = times.get(module, 0) + 1
        # The tensor is kept, so that no later one can be mistaken for it.
        inputs[module] = args[0] if args else next(iter(kwargs.values()), None)

    handles = [layer.module.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return {
        module: Called(
            times=times[module],
            input_shape=tuple(x.shape) if isinstance(x, Tensor) else (),
            same_input=id(x),
        )
        for module, x in inputs.items()
    }


def check_rows(layer: Layer, called: Called) -> None:
    """Raise if the layer's input does not count rows in its first dimension."""
    shape = called.input_shape
    if layer.rule is AnyLayer:
        return
    rows_first = len(shape) > 1 and shape[0] == TRIAL_ROWS
    # Rows and tokens flattened into one dimension keep the rows of a user adjacent.
    flattened = len(shape) == 2 and shape[0] % TRIAL_ROWS == 0 and layer.rule is not Embedding
    shared = layer.rule is Embedding and len(shape) > 1 and shape[0] == 1
    if not (rows_first or flattened or shared):
        raise MixedExamplesError(
            f"{type(layer.module).__name__} at {layer.name!r} sees an input of shape {shape} for "
            f"{TRIAL_ROWS} rows: the fast path cannot tell records apart there. Use "
            'clipping="plain".'
        )
