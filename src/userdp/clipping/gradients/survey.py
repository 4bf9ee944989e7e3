"""Which layers of a model hold trainable weights, which rule each gets, and how they are called.

The answers come from the model's modules and from small forward passes whose results are thrown
away. The model itself stays as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.pytorch_utils import Conv1D

from userdp.clipping.gradients.any_layer import AnyLayer
from userdp.clipping.gradients.layers import Embedding, LayerNorm, Product, RmsNorm
from userdp.clipping.gradients.lstm import Lstm
from userdp.clipping.gradients.merged_lora import MergedLora
from userdp.clipping.gradients.word_lstm import WordLstm
from userdp.errors import PLAIN, MixedExamplesError
from userdp.sharded_tensors import leaf_of

LayerRule = type[
    Product | LayerNorm | RmsNorm | Embedding | Lstm | MergedLora | WordLstm | AnyLayer
]

# Rows in the two forward passes: a dimension that counts rows has these sizes.
TRIAL_ROWS = 2
MORE_ROWS = 3

# Ragged batches store the gradients of layers without a cheaper form for every row. This is how
# many parameters such layers may have in all.
MOST_STORED_PARAMETERS = 2**21


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A module of the model with its rule and its trainable parameters, by the module's names."""

    name: str
    module: nn.Module
    rule: LayerRule
    parameters: dict[str, nn.Parameter]


@dataclass(frozen=True, kw_only=True)
class Called:
    """How a module was called on a few rows.

    `input_shape` is the shape of the last call's first argument, `all_shapes` are those of all its
    tensor arguments, and `every_shape` has the first argument's of every call. Modules with the
    same input have the same `same_input`.
    """

    times: int
    input_shape: tuple[int, ...]
    every_shape: tuple[tuple[int, ...], ...]
    all_shapes: tuple[tuple[int, ...], ...]
    same_input: int


@dataclass(frozen=True, kw_only=True)
class Survey:
    """A model's layers, and how each is called on rows of one shape."""

    layers: list[Layer]
    called: dict[nn.Module, Called]
    called_on_more: dict[nn.Module, Called]


def survey(
    model: nn.Module,
    row: Mapping[str, Tensor],
    forward: Callable[[Mapping[str, Tensor]], Any],
    *,
    merge_lora: bool = False,
) -> Survey:
    """See how layers are called while `forward` runs on copies of one row.

    Raises if a layer's input does not tell rows apart.
    """
    layers = find_layers(model, merge_lora=merge_lora)
    called, more = (
        look(layers, partial(forward, _repeated(row, rows))) for rows in (TRIAL_ROWS, MORE_ROWS)
    )
    _refuse_weights_read_past_their_layer(
        [layer for layer in layers if layer.module not in called],
        partial(forward, _repeated(row, TRIAL_ROWS)),
    )
    layers = [layer for layer in layers if layer.module in called]
    for layer in layers:
        check_rows(layer, called[layer.module], more[layer.module])
    return Survey(layers=layers, called=called, called_on_more=more)


def _refuse_weights_read_past_their_layer(
    uncalled: list[Layer], forward: Callable[[], Any]
) -> None:
    """Raise if the weight of a layer that is not called has a gradient: something else reads it."""
    weights = {
        f"{layer.name}.{name}": parameter
        for layer in uncalled
        for name, parameter in layer.parameters.items()
    }
    if not weights:
        return
    with torch.enable_grad():
        losses = forward()
        leaves = [leaf_of(weight) for weight in weights.values()]
        gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
    for name, gradient in zip(weights, gradients, strict=True):
        if gradient is not None:
            raise MixedExamplesError(
                f"{name!r} is read without calling its layer: the fast path would not see its "
                f"gradient. Use {PLAIN}."
            )


def _repeated(batch: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    """The first row of a batch, repeated."""
    return {name: tensor[:1].repeat_interleave(rows, 0) for name, tensor in batch.items()}


def find_layers(model: nn.Module, *, merge_lora: bool = False) -> list[Layer]:
    """Every module that owns trainable parameters, with its rule (`AnyLayer` for unknown kinds).

    With `merge_lora`, a plain LoRA layer counts as one layer instead of two thin ones.
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
        if WordLstm.describes(module):
            own_names = {n: p for n, p in module.named_parameters() if p.requires_grad}
            found.append(Layer(name=name, module=module, rule=WordLstm, parameters=own_names))
            return
        own = [p for p in module._parameters.values() if p is not None and p.requires_grad]
        # BERT's head lists the bias of its decoder once more: the decoder's rule covers it.
        if not own or (any(module.children()) and all(id(p) in leaf_owned for p in own)):
            for child_name, child in module.named_children():
                visit(f"{name}.{child_name}" if name else child_name, child)
            return
        parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        found.append(Layer(name=name, module=module, rule=_rule_for(module), parameters=parameters))

    visit("", model)
    # A module that sits in two places is one layer.
    return list({id(layer.module): layer for layer in reversed(found)}.values())[::-1]


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
    """How each layer is called in `forward`, a pass over a few rows."""
    every: dict[nn.Module, list[tuple[int, ...]]] = {}
    shapes: dict[nn.Module, tuple[tuple[int, ...], ...]] = {}
    inputs: dict[nn.Module, Any] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Kept alive, so that no later tensor gets the same id.
        inputs[module] = first = args[0] if args else next(iter(kwargs.values()), None)
        every.setdefault(module, []).append(shape_of(first))
        leaves = pytree.tree_leaves((args, kwargs))
        shapes[module] = tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor))

    def shape_of(given: Any) -> tuple[int, ...]:
        return tuple(given.shape) if isinstance(given, Tensor) else ()

    handles = [layer.module.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return {
        module: Called(
            times=len(every[module]),
            input_shape=shape_of(x),
            every_shape=tuple(every[module]),
            all_shapes=shapes[module],
            same_input=id(x),
        )
        for module, x in inputs.items()
    }


def counts_rows(called: Called, more: Called) -> tuple[bool, ...] | None:
    """Which of a module's tensor arguments count rows first; None if that cannot be said."""
    if called.times != 1 or len(called.all_shapes) != len(more.all_shapes):
        return None
    return tuple(
        few[:1] == (TRIAL_ROWS,) and many[:1] == (MORE_ROWS,)
        for few, many in zip(called.all_shapes, more.all_shapes, strict=True)
    )


def check_rows(layer: Layer, called: Called, more: Called) -> None:
    """Raise if an input of the layer does not count rows in its first dimension.

    `called` saw `TRIAL_ROWS` rows, `more` saw `MORE_ROWS`. A layer that is called several times is
    looked at each time: in one call its rows might be cut or reordered, and what it hands out for a
    user would then belong to others.
    """
    if layer.rule is AnyLayer:
        counted = counts_rows(called, more)
        if counted is None or any(counted):
            return
    for shape, larger in itertools.zip_longest(called.every_shape, more.every_shape, fillvalue=()):
        _check_call(layer, shape, larger)


def _check_call(layer: Layer, shape: tuple[int, ...], larger: tuple[int, ...]) -> None:
    first, larger_first = (sizes[0] if len(sizes) > 1 else 0 for sizes in (shape, larger))
    rows_first = (first, larger_first) == (TRIAL_ROWS, MORE_ROWS)
    # Rows and tokens may be flattened into one dimension: a user's rows stay adjacent.
    flattened = (
        len(shape) == 2
        and first % TRIAL_ROWS == 0
        and larger_first * TRIAL_ROWS == first * MORE_ROWS
        and first > 0
        and layer.rule is not Embedding
    )
    shared = layer.rule is Embedding and first == larger_first == 1
    if not (rows_first or flattened or shared):
        raise MixedExamplesError(
            f"{type(layer.module).__name__} at {layer.name!r} sees an input of shape {shape} for "
            f"{TRIAL_ROWS} rows: the fast path cannot tell records apart there. Use "
            f"{PLAIN}."
        )


def stores_little_by_row(model: nn.Module) -> bool:
    """Whether layers without a cheaper form are small enough to store gradients for every row."""
    layers = [layer for layer in find_layers(model) if layer.rule in (AnyLayer, Lstm, WordLstm)]
    count = sum(p.numel() for layer in layers for p in layer.parameters.values())
    return count <= MOST_STORED_PARAMETERS
