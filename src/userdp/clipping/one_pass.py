"""The sum of clipped per-user gradients of a batch of users, in one backward pass.

    form users' gradients (layers) -> norms -> factors -> sum of factor_u g_u

The model object stays what it is: while the pass runs, the classes of its layers with trainable
weights are swapped for subclasses with another `forward`, and put back after it.

References: Goodfellow 2015 and Li et al. 2022 (norms without gradients), Bu et al. 2023 (one pass
by keeping what the sum needs), Lee & Kifer 2021.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from userdp.clipping import kernels
from userdp.clipping.any_layer import AnyLayer
from userdp.clipping.compiled import Execution, pretrained
from userdp.clipping.factors import ROUNDING_MARGIN, clip_factors, largest_norm
from userdp.clipping.forms import Form, Rows, Stored
from userdp.clipping.layers import Embedding, Product, Tape
from userdp.clipping.merged_lora import MergedLora
from userdp.clipping.pack import Users
from userdp.clipping.products import can_square, num_tiles
from userdp.clipping.recurrent import Lstm
from userdp.clipping.rules import ClipRule, PerLayerClip
from userdp.clipping.sums import Sums
from userdp.clipping.survey import TRIAL_ROWS, Called, Layer, LayerRule, Survey, counts_rows
from userdp.clipping.survey import survey as survey_of
from userdp.errors import InputError
from userdp.updates import Batch, wide_dtype

# What is cheaper of a user with L tokens, in products of a Gram norm, as measured on an H200: those
# of a pair, L (L + 128) (I + O) in tiles of 128, and so many for each value that is scaled; or, for
# each of the I O values of a stored gradient, writing and reading it. Where the norm is taken while
# it is written, that is less, but pairs need less memory.
GRAM_TILE = 128
PRODUCTS_A_SCALED_VALUE = 720
PRODUCTS_A_STORED_VALUE = 600
# Values of a stored gradient, of all rows together, up to which it is stored by row.
MOST_BY_ROW = 2**25


def look_at(model: nn.Module, batch: Batch, execution: Execution) -> Survey:
    """What `OnePass` needs to know of the model: the same for all rows of one shape."""
    return survey_of(
        model,
        batch,
        lambda trial: execution.losses(model, trial),
        merge_lora=execution.merge_lora,
    )


class OnePass:
    """Clipped sums for batches of one shape; `survey` as `look_at` gave it for such rows."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        rule: ClipRule,
        example: Users,
        *,
        execution: Execution,
        survey: Survey | None = None,
    ) -> None:
        self._model = model
        self._parameters = list(parameters)
        self._rule = rule
        self._execution = execution
        self._users = example.count
        self._rows = len(example.weights)
        self._runs = example.runs
        # What layers hand out one gradient for: users, or rows where users have unlike many.
        self._units = self._users if self._runs is None else self._rows
        found = survey or look_at(model, example.batch, execution)
        self._called, self._called_on_more = found.called, found.called_on_more
        self._layers = found.layers
        self._group = found.groups
        self._ties = _ties(self._layers, self._called)
        self._layers = [self._for_shared_weights(layer) for layer in self._layers]
        self._giver: dict[int, nn.Module] = {}
        self._inputs_from: dict[nn.Module, nn.Module] = {}
        self._tapes = self._make_tapes()
        self._sums = Sums(max(self._group.values()) + 1 if isinstance(rule, PerLayerClip) else 1)
        self.margin = ROUNDING_MARGIN * torch.finfo(wide_dtype(self._parameters[0].dtype)).eps

    # ---- set-up

    def _product_dtype(self, weight: Tensor) -> torch.dtype:
        return self._execution.compute_dtype or weight.dtype

    def _times_used(self, parameter: nn.Parameter) -> int:
        return sum(
            self._called[layer.module].times
            for layer in self._layers
            for own in layer.parameters.values()
            if own is parameter
        )

    def _is_tied(self, layer: Layer) -> bool:
        """Whether it is an embedding or a head, and the other has the same weight."""
        return any(layer in tie for tie in self._ties)

    def _used_once(self, layer: Layer) -> bool:
        """Whether the layer alone sees the whole gradient of its weights (ties counted apart)."""
        tied = self._is_tied(layer)
        uses = {name: self._times_used(p) for name, p in layer.parameters.items()}
        return all(
            times == 1 or (tied and name == "weight" and times == 2) for name, times in uses.items()
        )

    def _for_shared_weights(self, layer: Layer) -> Layer:
        """Uses of a shared weight must be stored, to add up before their norm is taken."""
        if layer.rule is Embedding and not self._used_once(layer):
            return Layer(
                name=layer.name, module=layer.module, rule=AnyLayer, parameters=layer.parameters
            )
        return layer

    def _make_tapes(self) -> dict[nn.Module, Tape]:
        stored: dict[int, Tensor] = {}
        tapes: dict[nn.Module, Tape] = {}
        for layer in self._layers:
            tape = Tape(users=self._units, rows=self._rows)
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
            for name, parameter in layer.parameters.items():
                if layer.rule is Product and name == "weight" and self._prefers_pair(layer):
                    self._probe_pair(layer, tape)
                    continue
                # Layers that share a weight share its probe: autograd adds up what they hand out.
                if id(parameter) not in stored:
                    padding = tape.padding if name == "weight" else 0
                    shape = (parameter.shape[0] + padding, *parameter.shape[1:])
                    dtype = self._stored_dtype(layer.rule, name, parameter)
                    count = self._users if self._is_grouped(parameter) else self._units
                    stored[id(parameter)] = _probe(parameter, dtype, count, *shape)
                tape.probes[name] = stored[id(parameter)]
                if layer.rule is Product and name == "weight" and self._can_square(layer):
                    count, *shape = stored[id(parameter)].shape
                    wide = wide_dtype(stored[id(parameter)].dtype)
                    tape.probes["squares"] = _probe(parameter, wide, num_tiles(*shape), count)
        return tapes

    def _can_square(self, layer: Layer) -> bool:
        """Whether the layer's product gives its norms as well."""
        weight = layer.parameters["weight"]
        # What several uses add up to has another norm, and so have the rows of a user.
        if not self._used_once(layer) or not (self._runs is None or self._is_grouped(weight)):
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

    def _is_grouped(self, weight: Tensor) -> bool:
        """Whether users' stored gradients are formed where users have unlike many rows.

        Otherwise rows' are, as is cheaper for thin weights.
        """
        layers = [
            (layer, name)
            for layer in self._layers
            for name, own in layer.parameters.items()
            if own is weight and layer.rule is not Embedding
        ]
        if self._runs is None or not all(
            layer.rule is Product and name == "weight" for layer, name in layers
        ):
            return False
        tied = any(self._is_tied(layer) for layer, _ in layers)
        if tied or weight.numel() * self._rows <= MOST_BY_ROW:
            return tied
        return is_aligned(weight, max(self._padding(layer) for layer, _ in layers))

    def _probe_pair(self, layer: Layer, tape: Tape) -> None:
        """Ask a product for its output gradients, and for its input if no layer has given it."""
        weight, called = layer.parameters["weight"], self._called[layer.module]
        tokens, dtype = self._tokens(called), self._product_dtype(weight)
        inputs, outputs = _widths(layer.module, weight)
        tape.probes["outputs"] = _probe(weight, dtype, self._units, tokens, outputs + tape.padding)
        source = self._giver.setdefault(called.same_input, layer.module)
        self._inputs_from[layer.module] = source
        if source is layer.module:
            tape.probes["inputs"] = _probe(weight, dtype, self._units, tokens, inputs)

    def _stored_dtype(self, rule: LayerRule, name: str, parameter: Tensor) -> torch.dtype:
        if rule is MergedLora or (rule is Product and name == "weight"):
            return self._product_dtype(parameter)
        return parameter.dtype if rule in (AnyLayer, Lstm) else wide_dtype(parameter.dtype)

    def _tokens(self, called: Called) -> int:
        """Tokens of one user (or row) at a layer, from how it was called on the trial's rows."""
        positions = 1
        for size in called.input_shape[:-1]:
            positions *= size
        return positions // TRIAL_ROWS * (self._rows // self._units)

    def _typical_tokens(self, called: Called) -> float:
        """Tokens of a user at a layer, where users differ that of a middling one."""
        runs = self._runs
        rows = 1.0 if runs is None else math.sqrt(runs.fewest_rows * runs.most_rows)
        return rows * self._tokens(called)

    def _prefers_pair(self, layer: Layer) -> bool:
        weight = layer.parameters["weight"]
        # On the CPU products cost more than memory: a stored gradient is the product that an
        # ordinary backward pass does anyway.
        if not weight.is_cuda or not self._used_once(layer):
            return False
        # What rounding does to a scaled side may be too small for float16 to say.
        if self._product_dtype(weight) == torch.float16:
            return False
        tokens = self._typical_tokens(self._called[layer.module])
        inputs, _ = _widths(layer.module, weight)
        outputs = self._outputs_of_input(layer)
        return pair_is_cheaper(tokens, inputs, outputs)

    def _outputs_of_input(self, layer: Layer) -> list[int]:
        """The widths of all products of the layer's input: pairs share it, and its Gram matrix."""
        shared = self._called[layer.module].same_input
        return [
            _widths(other.module, other.parameters["weight"])[1]
            for other in self._layers
            if other.rule is Product
            and "weight" in other.parameters
            and self._called[other.module].same_input == shared
            and self._used_once(other)
        ]

    def _is_head(self, layer: Layer) -> bool:
        inner = pretrained(self._model)
        return inner is not None and inner.get_output_embeddings() is layer.module

    # ---- one batch

    def __call__(
        self,
        users: Users,
        total: Sequence[Tensor],
        clip_norm: Tensor | float | None = None,
    ) -> Tensor:
        """Add the clipped sum to `total`, one tensor a parameter; return the norms. All secret.

        `clip_norm` as in `clip_factors`.
        """
        forms = self._gradients(users)
        with kernels.wide_arithmetic(users.weights.device):
            squared = self._squared_norms(forms)
            factors = clip_factors(squared, self._rule, margin=self.margin, clip_norm=clip_norm)
            place = {id(p): tensor for p, tensor in zip(self._parameters, total, strict=True)}
            factors = self._sums.scale(factors, largest_norm(self._rule, clip_norm))
            self._sums.add([place[id(parameter)] for parameter, _ in forms], factors)
        return squared.sum(0).sqrt()

    def norms(self, users: Users) -> Tensor:
        """Every user's norm over all parameters. Secret."""
        forms = self._gradients(users)
        with kernels.wide_arithmetic(users.weights.device):
            return self._squared_norms(forms).sum(0).sqrt()

    @torch.enable_grad()
    def _gradients(self, users: Users) -> list[tuple[nn.Parameter, Form]]:
        """The users' gradients of every parameter, each in its form."""
        assert (users.count, len(users.weights)) == (self._users, self._rows)
        assert (users.runs is None) == (self._runs is None)
        self._runs = users.runs
        self._tell_ends()
        layers = [(layer.module, layer.rule) for layer in self._layers]
        with self._execution.prepared(self._model, layers, self._tapes):
            losses = self._execution.losses(self._model, users.batch)
            loss = (losses * users.weights.to(losses.dtype)).sum()
            return self._forms(self._hand_out(loss))

    def _squared_norms(self, forms: list[tuple[nn.Parameter, Form]]) -> Tensor:
        """(layers, users), or (1, users) where all are clipped together."""
        grouped = [(self._group[id(parameter)], form) for parameter, form in forms]
        return self._sums.squared_norms(grouped, self._tied_places(forms), self._runs)

    def _tell_ends(self) -> None:
        """Tell products where each user's rows end."""
        runs = self._runs
        if runs is None:
            return
        # A copy: compiled blocks want their inputs aligned.
        ends = runs.starts[1:].clone()
        for layer in self._layers:
            tape = self._tapes[layer.module]
            if layer.rule is not Product or "weight" not in tape.probes:
                continue
            if self._is_grouped(layer.parameters["weight"]):
                tape.ends = ends

    def _hand_out(self, loss: Tensor) -> dict[nn.Module, dict[str, Tensor]]:
        probes: dict[int, Tensor] = {
            id(probe): probe for tape in self._tapes.values() for probe in tape.probes.values()
        }
        gradients = torch.autograd.grad(loss, list(probes.values()), allow_unused=True)
        # What compiled blocks return still hangs on their graph.
        detached = [None if g is None else g.detach() for g in gradients]
        by_probe = dict(zip(probes, detached, strict=True))
        return {
            module: {
                name: gradient
                for name, probe in tape.probes.items()
                if (gradient := by_probe[id(probe)]) is not None
            }
            for module, tape in self._tapes.items()
        }

    def _forms(self, handed: dict[nn.Module, dict[str, Tensor]]) -> list[tuple[nn.Parameter, Form]]:
        found: list[tuple[nn.Parameter, Form]] = []
        seen: set[int] = set()
        for layer in self._layers:
            gradients = handed[layer.module]
            if not gradients:
                continue
            source = self._inputs_from.get(layer.module)
            inputs = handed[source].get("inputs") if source is not None else None
            if source is not None and inputs is None:
                giver = next(other.name for other in self._layers if other.module is source)
                raise InputError(
                    f"{giver!r} has the same input as {layer.name!r}, and the loss does not use "
                    'its output. Freeze it, or use clipping="plain" ([training] clipping).'
                )
            tape = self._tapes[layer.module]
            for name, form in layer.rule.forms(layer.module, gradients, inputs).items():
                grouped = name == "weight" and tape.ends is not None
                if isinstance(form, Stored) and self._runs is not None and not grouped:
                    form = replace(form, by_row=True)
                # A stored gradient that several layers added to is one form.
                key = id(form.gradients_U) if isinstance(form, Stored) else id(form)
                if key not in seen:
                    seen.add(key)
                    found.append((layer.parameters[name], form))
        return found

    def _tied_places(self, forms: list[tuple[nn.Parameter, Form]]) -> list[tuple[int, int]]:
        """Where in `forms` an embedding and the head that shares its weight are."""
        found: list[tuple[int, int]] = []
        for embedding, _ in self._ties:
            weight = embedding.parameters["weight"]
            places = [i for i, (parameter, _) in enumerate(forms) if parameter is weight]
            if len(places) == 2:
                first, second = places
                rows_first = isinstance(forms[first][1], Rows)
                found.append((first, second) if rows_first else (second, first))
        return found


def _ties(layers: list[Layer], called: dict[nn.Module, Called]) -> list[tuple[Layer, Layer]]:
    """Pairs (embedding, head) that share their weight and are each called once."""
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
    """Whether CUDA's grouped products take a weight of this shape, so many rows added, uncopied."""
    first, second = weight.shape
    return (first + padding) % 8 == 0 and second % 8 == 0


def pair_is_cheaper(tokens: float, inputs: int, outputs: Sequence[int]) -> bool:
    """Whether a GPU is done sooner with pairs than with stored gradients, and they are not larger.

    Of a user with so many tokens, and of all products of one input. The inner product of a tied
    head with its embedding is left out, though only a pair's takes time: a head of 128,256 by 2,048
    is done 1% of a step sooner if stored for 1,024 tokens, and needs 4 GB more.
    """
    values, stored = tokens * (inputs + sum(outputs)), inputs * sum(outputs)
    scaled = tokens * (inputs if len(outputs) > 1 else min(inputs, *outputs))
    cost = (tokens + GRAM_TILE) * values + PRODUCTS_A_SCALED_VALUE * scaled
    return values <= stored and cost < PRODUCTS_A_STORED_VALUE * stored


def _probe(like: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    """Zeros of any shape in the memory of one number."""
    return torch.zeros((), dtype=dtype, device=like.device).expand(shape).detach().requires_grad_()


def _widths(module: nn.Module, weight: Tensor) -> tuple[int, int]:
    """(inputs, outputs) of a product."""
    first, second = weight.shape
    return (second, first) if type(module) is nn.Linear else (first, second)
