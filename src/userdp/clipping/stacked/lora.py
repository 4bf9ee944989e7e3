"""Local training of stacked LoRA adapters: the base model runs once for the rows of all users.

Only the two thin products of each adapter are taken user by user (`stacked_lora`). So attention,
the compiled blocks and the loss are those of the fast path, where `torch.func` would bring its own.
The gradient of the sum of the users' losses, by a user's own adapters, is that of the user's own
loss: the base has no gradient, and nobody else's rows go through these adapters.

All adapters of a user lie in one row of a buffer (user, number), so that a local step and its
clipping are a few operations, whatever the number of layers.

Shapes: U users, B records of a local batch, P numbers of all adapters. Secret until noise is added.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from userdp.clipping.execute.execution import Execution
from userdp.clipping.stacked.room import Factors
from userdp.losses import Batch
from userdp.stacked_lora import adapter_layers, stacked
from userdp.updates.contract import Descent


def stacked_adapters(
    model: nn.Module, parameters: Sequence[Tensor], descent: Descent
) -> StackedAdapters | None:
    """The program for these local steps; None unless all that is trained are plain adapters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layers = adapter_layers(model)
    # Under dropout, users would share a stream of random numbers that nobody accounts for.
    drops = any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for m in model.modules())
    if layers is None or drops or len({parameter.dtype for parameter in parameters}) > 1:
        return None
    if set(layers) != {names[id(parameter)] for parameter in parameters}:
        return None
    return StackedAdapters(model, {names[id(p)]: p for p in parameters}, descent)


class StackedAdapters:
    """The adapters of a microbatch of users, and their local steps."""

    def __init__(self, model: nn.Module, parameters: dict[str, Tensor], descent: Descent) -> None:
        self._model, self._parameters, self._descent = model, parameters, descent
        ends = list(itertools.accumulate(p.numel() for p in parameters.values()))
        self._slices = [slice(*pair) for pair in itertools.pairwise([0, *ends])]
        self._weights: dict[str, Tensor] = {}
        self._theta_UP = torch.empty(0)

    @contextlib.contextmanager
    def started(self, num_users: int, execution: Execution) -> Iterator[None]:
        """Inside, the model runs with adapters of each user, which begin as the model's own."""
        self._start(num_users)
        with execution.prepared(self._model), stacked(self._model, self._weights):
            yield

    def _start(self, num_users: int) -> None:
        given = [parameter.detach() for parameter in self._parameters.values()]
        wide = torch.promote_types(given[0].dtype, torch.float32)
        self._start_P = torch.cat([tensor.flatten() for tensor in given]).to(wide)
        if len(self._theta_UP) != num_users:
            # Compiled code finds the same tensors in the next microbatch.
            self._theta_UP = self._start_P.new_empty((num_users, len(self._start_P)))
            self._used_UP = self._theta_UP.to(given[0].dtype)
            self._weights = {
                name: self._used_UP[:, own].view(num_users, *tensor.shape).detach()
                for name, own, tensor in zip(self._parameters, self._slices, given, strict=True)
            }
            for weight in self._weights.values():
                weight.requires_grad_()
        self._theta_UP[:] = self._start_P

    def step(
        self,
        batch: Batch,
        mask_UB: Tensor,
        acts_U: Tensor,
        *,
        execution: Execution,
        by_parameter: bool,
        factors: Factors,
    ) -> None:
        """A local step of the users who have a batch; the others rest."""
        self._used_UP.copy_(self._theta_UP)
        rows = {name: tensor.flatten(0, 1) for name, tensor in batch.items()}
        weights = list(self._weights.values())
        with torch.enable_grad():
            losses = execution.losses(self._model, rows).view(mask_UB.shape)
            # Not a product: the loss of a padded row may be anything, also not finite.
            means = torch.where(mask_UB, losses, 0.0).sum(1) / mask_UB.sum(1).clamp(min=1)
            found = torch.autograd.grad(means.sum(), weights)
        gradient = torch.cat([tensor.flatten(1) for tensor in found], 1).to(self._theta_UP.dtype)
        way = self._theta_UP - self._start_P
        if self._descent.penalty:
            gradient.add_(way, alpha=self._descent.penalty)
        moved = self._theta_UP.add(gradient, alpha=-self._descent.rate).sub_(self._start_P)
        way = torch.where(acts_U[:, None], self._clipped(moved, by_parameter, factors), way)
        torch.add(self._start_P, way, out=self._theta_UP)

    def ways(self) -> list[Tensor]:
        """theta - theta^0 of every user, in the order of the parameters."""
        way = self._theta_UP - self._start_P
        return [
            way[:, own].view(len(way), *parameter.shape)
            for own, parameter in zip(self._slices, self._parameters.values(), strict=True)
        ]

    def _clipped(self, moved_UP: Tensor, by_parameter: bool, factors: Factors) -> Tensor:
        pieces = self._slices if by_parameter else [slice(None)]
        squares = torch.stack(
            [
                torch.linalg.vector_norm(moved_UP[:, own], dim=1, dtype=torch.float64).square()
                for own in pieces
            ]
        )
        found = factors(squares).to(moved_UP.dtype)
        for own, factor in zip(pieces, found, strict=True):
            part = moved_UP[:, own]
            # What is not finite has the factor zero, and must not be multiplied by it.
            part.copy_(torch.where(factor[:, None] > 0, part * factor[:, None], 0.0))
        return moved_UP
