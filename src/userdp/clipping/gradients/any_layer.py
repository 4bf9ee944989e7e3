"""Per-user gradients of any layer without a rule of its own, by `torch.func`.

This is slower than a rule, because the layer's forward pass runs again, and gradients are always
stored. But it is right for every module that keeps the rows of a batch apart and that `torch.vmap`
can run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from userdp.clipping.execute.layer_swap import Tape
from userdp.clipping.gradients.layers import StoredForms
from userdp.errors import PLAIN, MixedExamplesError

Call = Callable[[dict[str, Tensor], Sequence[Tensor]], tuple[Tensor, ...]]

_TENSOR = object()


class AnyLayer(StoredForms):
    """A module with everything below it; its weights have the names that the module gives them."""

    @staticmethod
    @torch.compiler.disable
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's own output."""
        tape: Tape = module.userdp_tape
        original = _original(module)
        names = list(tape.probes)
        flat, structure = pytree.tree_flatten((args, kwargs))
        places = [i for i, value in enumerate(flat) if isinstance(value, Tensor)]
        tensors_given = [flat[place] for place in places]
        # Only autograd keeps the tensors, so that a checkpointed block can free them.
        flat = [None if isinstance(value, Tensor) else value for value in flat]
        # The output's leaves that are no tensors, such as None for attention weights that were not
        # asked for. Output tensors are not kept here: they would keep this call alive.
        others: list[Any] = []
        structure_of_output: list[Any] = []

        def call(parameters: dict[str, Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            values = list(flat)
            for place, value in zip(places, inputs, strict=True):
                values[place] = value
            inner_args, inner_kwargs = pytree.tree_unflatten(values, structure)
            output = torch.func.functional_call(original, parameters, inner_args, inner_kwargs)
            leaves, form = pytree.tree_flatten(output)
            others[:] = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            structure_of_output[:] = [form]
            return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

        weights = dict(module.named_parameters())
        outputs = _ByUser.apply(
            call,
            {name: weights[name].detach() for name in names},
            tape,
            type(original).__name__,
            len(places),
            *tensors_given,
            *[tape.probes[name] for name in names],
        )
        tensors = iter(outputs)
        leaves = [next(tensors) if other is _TENSOR else other for other in others]
        return pytree.tree_unflatten(leaves, structure_of_output[0])


def _original(module: nn.Module) -> nn.Module:
    """A copy of the module with its own forward instead of the rule's; it shares the weights."""
    twin = copy.copy(module)
    twin.__class__ = type(module).__mro__[1]
    return twin


class _ByUser(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        weights: dict[str, Tensor],
        tape: Tape,
        name: str,
        num_inputs: int,
        *tensors: Tensor | None,
    ) -> Any:
        inputs = tensors[:num_inputs]
        ctx.save_for_backward(*inputs)
        ctx.call, ctx.weights, ctx.tape, ctx.name = call, weights, tape, name
        ctx.differentiable = ctx.needs_input_grad[5 : 5 + num_inputs]
        outputs = call(weights, [value for value in inputs if value is not None])
        for output in outputs:
            if output.shape[:1] != (tape.rows,):
                raise MixedExamplesError(
                    f"{name} has no rule of its own and gives an output of shape "
                    f"{tuple(output.shape)} for {tape.rows} rows: records cannot be told apart. "
                    f"Use {PLAIN}."
                )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        tape: Tape = ctx.tape
        inputs: tuple[Tensor, ...] = ctx.saved_tensors
        users, rows = tape.users, tape.rows

        def split(tensor: Tensor) -> Tensor:
            return tensor.view(users, rows // users, *tensor.shape[1:])

        # Sizes alone could mislead: with as many tokens as rows, a mask (tokens, tokens) looks like
        # rows.
        by_row = tape.by_row or [value.shape[:1] == (rows,) for value in inputs]
        asked = [i for i, differentiable in enumerate(ctx.differentiable) if differentiable]

        def one_user(values: Sequence[Tensor], upstream: Sequence[Tensor]) -> Any:
            def run(weights: dict[str, Tensor], *changing: Tensor) -> tuple[Tensor, ...]:
                merged = list(values)
                for place, value in zip(asked, changing, strict=True):
                    merged[place] = value
                return ctx.call(weights, merged)

            pull_back = torch.func.vjp(run, ctx.weights, *[values[i] for i in asked])[1]
            return pull_back(tuple(upstream))

        dims = [0 if mapped else None for mapped in by_row]
        values = [split(v) if mapped else v for v, mapped in zip(inputs, by_row, strict=True)]
        upstream = [split(gradient.contiguous()) for gradient in gradients]
        # For torch's other attention kernels vmap has no rule: it warns, and loops over the users.
        with sdpa_kernel(SDPBackend.MATH):
            weights, *changing = torch.vmap(one_user, in_dims=(dims, 0))(values, upstream)
        returned: list[Tensor | None] = [None] * len(inputs)
        for place, gradient in zip(asked, changing, strict=True):
            returned[place] = gradient.flatten(0, 1) if by_row[place] else gradient.sum(0)
        return None, None, None, None, None, *returned, *weights.values()
