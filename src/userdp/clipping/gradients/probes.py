"""Which form every parameter's gradient is handed out in, and the probes that ask for it.

A probe is a tensor of zeros that takes no memory (stride 0). A layer's backward pass returns the
users' gradients as the "gradient" of its probes (`layers`). The shape of a probe says what is asked
for: a stored gradient for every user or row, or the two sides of a pair (`forms`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from userdp.clipping.batches.users import Users
from userdp.clipping.execute.execution import Execution
from userdp.clipping.execute.layer_swap import Tape
from userdp.clipping.execute.models import output_layer
from userdp.clipping.gradients.any_layer import AnyLayer
from userdp.clipping.gradients.layers import Embedding, LayerNorm, Product, RmsNorm
from userdp.clipping.gradients.lstm import Lstm
from userdp.clipping.gradients.merged_lora import MergedLora
from userdp.clipping.gradients.survey import (
    TRIAL_ROWS,
    Called,
    Layer,
    LayerRule,
    Survey,
    counts_rows,
)
from userdp.clipping.kernels.products import can_square, num_tiles
from userdp.clipping.kernels.running import any_size
from userdp.losses import wide_dtype
from userdp.updates.scaled_gradient import Scales

# The costs of the two forms for a user with L tokens, in multiplications of a Gram norm, measured
# on an H200. A pair costs L (L + GRAM_TILE) (I + O), computed in tiles, and this many for each
# value that is scaled. A stored gradient costs this many for each of its I O values, which are
# written and read again. It is less where the norm is taken while values are written, but pairs
# need less memory.
GRAM_TILE = 128
PRODUCTS_A_SCALED_VALUE = 720
PRODUCTS_A_STORED_VALUE = 600
# A ragged batch stores a gradient by row if it has at most this many values in all rows together.
MOST_VALUES_BY_ROW = 2**25
# The rules of layers that can add up a bias's or a norm's gradient by user.
ADDING = (Product, LayerNorm, RmsNorm)


class Probes:
    """The probes of all layers, on `tapes`, for batches of one shape.

    `unit` below is what gradients are handed out for: a user, or a row in a ragged batch.
    """

    def __init__(
        self,
        model: nn.Module,
        survey: Survey,
        example: Users,
        execution: Execution,
        *,
        scales: Scales | None = None,
    ) -> None:
        self._model = model
        self._scales = scales
        self._execution = execution
        self._users = example.count
        self._rows = len(example.weights)
        self._ranges = example.ranges
        self._units = self._users if self._ranges is None else self._rows
        self._called, self._called_on_more = survey.called, survey.called_on_more
        self.layers = survey.layers
        self._ties = _ties(self.layers, self._called)
        self.layers = [self._for_shared_weights(layer) for layer in self.layers]
        # Biases and norms' weights, whose gradients are sums over tokens.
        self._added_up = {id(p) for layer in self.layers for p in _added_up(layer)}
        # Either all of them are handed out by user or all by row: a layer is told where users end
        # for everything it stores.
        self._adds_by_user = self._ranges is not None and not any(
            id(parameter) in self._added_up
            for layer in self.layers
            for parameter in layer.parameters.values()
            if layer.rule not in ADDING
        )
        # Layers with the same input share it: by the input's id, the layer that hands it out.
        self._giver: dict[int, nn.Module] = {}
        self.inputs_from: dict[nn.Module, nn.Module] = {}
        self.tapes = self._make_tapes()

    @property
    def tied_weights(self) -> list[nn.Parameter]:
        """Weights of embeddings that are also the weight of a head."""
        return [embedding.parameters["weight"] for embedding, _ in self._ties]

    def set_ends(self, ends: Tensor) -> None:
        """Tell those layers of a ragged batch that store by user where each user's rows end."""
        for layer in self.layers:
            tape = self.tapes[layer.module]
            stored = tape.probes.keys() & layer.parameters.keys()
            if layer.rule is not Embedding and any(
                self.is_stored_by_user(layer.parameters[name]) for name in stored
            ):
                tape.ends = any_size(ends, 0)

    def is_stored_by_user(self, weight: Tensor) -> bool:
        """Whether a ragged batch stores this parameter's gradients by user.

        Otherwise it stores them by row, which is cheaper for thin weights.
        """
        if id(weight) in self._added_up:
            return self._adds_by_user
        layers = [
            (layer, name)
            for layer in self.layers
            for name, own in layer.parameters.items()
            if own is weight and layer.rule is not Embedding
        ]
        if self._ranges is None or not all(
            layer.rule is Product and name == "weight" for layer, name in layers
        ):
            return False
        tied = any(self._is_tied(layer) for layer, _ in layers)
        # The same answer for a smaller batch, so that both run the same compiled code.
        if tied or weight.numel() * self._ranges.full_rows <= MOST_VALUES_BY_ROW:
            return tied
        return is_aligned(weight, max(self._padding(layer) for layer, _ in layers))

    def _make_tapes(self) -> dict[nn.Module, Tape]:
        stored: dict[int, Tensor] = {}
        tapes: dict[nn.Module, Tape] = {}
        for layer in self.layers:
            each_row = self._ranges is not None
            tape = Tape(users=self._units, rows=self._rows, each_row=each_row)
            if layer.rule is AnyLayer:
                called = self._called[layer.module]
                tape.by_row = counts_rows(called, self._called_on_more[layer.module])
            tapes[layer.module] = tape
            if layer.rule is Embedding:
                weight = layer.parameters["weight"]
                shape = self._called[layer.module].input_shape[1:]
                tape.probes["weight"] = _probe(
                    weight, weight.dtype, self._rows, *shape, weight.shape[1]
                )
                continue
            tape.padding = self._padding(layer)
            tape.adds_by_user = self._adds_by_user
            if layer.rule is Product and "weight" in layer.parameters:
                tape.weight_by_user = self.is_stored_by_user(layer.parameters["weight"])
            for name, parameter in layer.parameters.items():
                if layer.rule is Product and name == "weight" and self._prefers_pair(layer):
                    self._probe_pair(layer, tape)
                    continue
                # Layers that share a weight share its probe: autograd adds up what they hand out.
                if id(parameter) not in stored:
                    padding = tape.padding if name == "weight" else 0
                    shape = (parameter.shape[0] + padding, *parameter.shape[1:])
                    dtype = self._stored_dtype(layer.rule, name, parameter)
                    count = self._users if self.is_stored_by_user(parameter) else self._units
                    stored[id(parameter)] = _probe(parameter, dtype, count, *shape)
                tape.probes[name] = stored[id(parameter)]
                if layer.rule is Product and name == "weight" and self._can_square(layer):
                    count, *shape = stored[id(parameter)].shape
                    wide = wide_dtype(stored[id(parameter)].dtype)
                    tape.probes["squares"] = _probe(parameter, wide, num_tiles(*shape), count)
        if self._ranges is not None:
            for tape in tapes.values():
                for name, probe in tape.probes.items():
                    any_size(probe, 1 if name == "squares" else 0)
        return tapes

    def _probe_pair(self, layer: Layer, tape: Tape) -> None:
        """Ask a product for its output gradients, and for its input if no other layer gives it."""
        weight, called = layer.parameters["weight"], self._called[layer.module]
        tokens, dtype = self._tokens(called), self._product_dtype(weight)
        inputs, outputs = _widths(layer.module, weight)
        tape.probes["outputs"] = _probe(weight, dtype, self._units, tokens, outputs + tape.padding)
        source = self._giver.setdefault(called.same_input, layer.module)
        self.inputs_from[layer.module] = source
        if source is layer.module:
            tape.probes["inputs"] = _probe(weight, dtype, self._units, tokens, inputs)

    def _prefers_pair(self, layer: Layer) -> bool:
        weight = layer.parameters["weight"]
        # On the CPU multiplying costs more than memory does, and a stored gradient is a product
        # that an ordinary backward pass computes anyway.
        if not weight.is_cuda or not self._used_once(layer):
            return False
        if self._execution.chunk_logits and self._is_head(layer):
            return False
        # The rounding errors of a scaled side may be too small for float16.
        if self._product_dtype(weight) == torch.float16:
            return False
        # The side of a pair cannot be multiplied by a number for each weight.
        if self._scales is not None and not self._scales.of(weight).is_by_row_and_column:
            return False
        tokens = self._typical_tokens(self._called[layer.module])
        inputs, _ = _widths(layer.module, weight)
        outputs = self._outputs_of_input(layer)
        return pair_is_cheaper(tokens, inputs, outputs)

    def _can_square(self, layer: Layer) -> bool:
        """Whether the layer's product can hand out its norms as well."""
        weight = layer.parameters["weight"]
        # The norm of a sum is not the sum of norms: neither for several uses of a weight, nor for
        # the rows of a user.
        by_user = self._ranges is None or self.is_stored_by_user(weight)
        # And a product that is scaled afterwards has other norms than those taken while it was
        # written.
        if not self._used_once(layer) or not by_user or self._scales is not None:
            return False
        rows, columns = weight.shape
        return can_square(
            rows + self._padding(layer),
            columns,
            tokens=self._tokens(self._called[layer.module]),
            dtype=self._product_dtype(weight),
            device=weight.device,
        )

    def _padding(self, layer: Layer) -> int:
        """Columns added to the layer, if it is the head."""
        # A weight shared with a layer that is not padded has one stored gradient for both.
        padded = layer.rule is Product and self._is_head(layer) and self._used_once(layer)
        return self._execution.head_padding if padded else 0

    def _is_head(self, layer: Layer) -> bool:
        return output_layer(self._model) is layer.module

    def _stored_dtype(self, rule: LayerRule, name: str, parameter: Tensor) -> torch.dtype:
        if rule is MergedLora or (rule is Product and name == "weight"):
            return self._product_dtype(parameter)
        return parameter.dtype if rule in (AnyLayer, Lstm) else wide_dtype(parameter.dtype)

    def _product_dtype(self, weight: Tensor) -> torch.dtype:
        return self._execution.compute_dtype or weight.dtype

    def _tokens(self, called: Called) -> int:
        """Tokens of one unit at a layer, from how the layer was called on the trial's rows."""
        positions = 1
        for size in called.input_shape[:-1]:
            positions *= size
        return positions // TRIAL_ROWS * (self._rows // self._units)

    def _typical_tokens(self, called: Called) -> float:
        """Tokens of a user at a layer; in a ragged batch, of a user of middle size."""
        ranges = self._ranges
        rows = 1.0 if ranges is None else math.sqrt(ranges.fewest_rows * ranges.most_rows)
        return rows * self._tokens(called)

    def _outputs_of_input(self, layer: Layer) -> list[int]:
        """The widths of all products of the layer's input: their pairs share its Gram matrix."""
        shared = self._called[layer.module].same_input
        return [
            _widths(other.module, other.parameters["weight"])[1]
            for other in self.layers
            if other.rule is Product
            and "weight" in other.parameters
            and self._called[other.module].same_input == shared
            and self._used_once(other)
        ]

    def _times_used(self, parameter: nn.Parameter) -> int:
        return sum(
            self._called[layer.module].times
            for layer in self.layers
            for own in layer.parameters.values()
            if own is parameter
        )

    def _is_tied(self, layer: Layer) -> bool:
        """Whether the layer is an embedding or a head that shares its weight with the other."""
        return any(layer in tie for tie in self._ties)

    def _used_once(self, layer: Layer) -> bool:
        """Whether the layer sees the whole gradient of its weights.

        A tied embedding and head each count as one use: their two forms are kept apart.
        """
        tied = self._is_tied(layer)
        uses = {name: self._times_used(p) for name, p in layer.parameters.items()}
        return all(
            times == 1 or (tied and name == "weight" and times == 2) for name, times in uses.items()
        )

    def _for_shared_weights(self, layer: Layer) -> Layer:
        """The layer, with stored gradients if other layers use its weight too.

        Gradients of all uses must add up before their norm is taken, and only stored ones can.
        """
        if layer.rule is Embedding and not self._used_once(layer):
            return Layer(
                name=layer.name, module=layer.module, rule=AnyLayer, parameters=layer.parameters
            )
        return layer


def _added_up(layer: Layer) -> list[nn.Parameter]:
    """The layer's parameters whose gradients are sums over tokens."""
    if layer.rule not in ADDING:
        return []
    return [
        p for name, p in layer.parameters.items() if layer.rule is not Product or name == "bias"
    ]


def _ties(layers: list[Layer], called: dict[nn.Module, Called]) -> list[tuple[Layer, Layer]]:
    """(embedding, head) for every two that share their weight and are each called once."""
    embeddings = {
        id(layer.parameters["weight"]): layer for layer in layers if layer.rule is Embedding
    }
    uses: dict[int, int] = {}
    for layer in layers:
        for parameter in layer.parameters.values():
            uses[id(parameter)] = uses.get(id(parameter), 0) + called[layer.module].times
    return [
        (embeddings[id(weight)], layer)
        for layer in layers
        if layer.rule is Product
        and type(layer.module) is nn.Linear
        and (weight := layer.parameters.get("weight")) is not None
        and id(weight) in embeddings
        and uses[id(weight)] == 2
    ]


def is_aligned(weight: Tensor, padding: int) -> bool:
    """Whether CUDA's grouped products take the weight, with `padding` more rows, uncopied."""
    first, second = weight.shape
    return (first + padding) % 8 == 0 and second % 8 == 0


def pair_is_cheaper(tokens: float, inputs: int, outputs: Sequence[int]) -> bool:
    """Whether a GPU is faster with pairs than with stored gradients, and they are not larger.

    For a user with this many tokens, and for all products of one input. The inner product of a tied
    head with its embedding is not counted, although it takes time only for a pair: a head of
    128,256 by 2,048, stored for 1,024 tokens, makes a step 1% faster and needs 4 GB more.
    """
    values, stored = tokens * (inputs + sum(outputs)), inputs * sum(outputs)
    scaled = tokens * (inputs if len(outputs) > 1 else min(inputs, *outputs))
    cost = (tokens + GRAM_TILE) * values + PRODUCTS_A_SCALED_VALUE * scaled
    return values <= stored and cost < PRODUCTS_A_STORED_VALUE * stored


def _probe(like: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    """Zeros of any shape in the memory of one number."""
    probe = torch.zeros((), dtype=dtype, device=like.device).expand(shape)
    return probe.detach().requires_grad_()


def _widths(module: nn.Module, weight: Tensor) -> tuple[int, int]:
    """(inputs, outputs) of a product."""
    first, second = weight.shape
    return (second, first) if type(module) is nn.Linear else (first, second)
