"""The clipped gradient of one user alone: an ordinary backward pass, then one factor.

For users as large as a batch or larger. The rows of a larger one come in several batches, whose
gradients add up before the one clipping.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from userdp.clipping.batches.users import Users
from userdp.clipping.execute.execution import Execution
from userdp.clipping.factors import ROUNDING_MARGIN, clip_factors, largest_norm
from userdp.clipping.flat import adding
from userdp.clipping.gradients.forms import Stored
from userdp.clipping.gradients.sums import Sums
from userdp.clipping.kernels import running
from userdp.clipping.layer_groups import Layers
from userdp.clipping.rules import ClipRule
from userdp.losses import Update, at_least_float32
from userdp.sharded_tensors import leaf_of
from userdp.updates.scaled_gradient import Scales


class OneUser:
    """Ordinary gradients of one user's rows, added up until they are clipped."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        rule: ClipRule,
        *,
        scales: Scales | None = None,
    ) -> None:
        self._model = model
        self._parameters = list(parameters)
        self._rule = rule
        self._scales = scales
        self._groups = Layers(model, parameters).by(rule)
        self._sums = Sums(max(self._groups) + 1)

    def gradient(self, rows: Users, execution: Execution) -> Update:
        """The gradient of the weighted losses of these rows, one tensor a parameter. Secret."""
        with execution.prepared(self._model):
            losses = execution.losses(self._model, rows.batch)
            loss = (losses * rows.weights.to(losses.dtype)).sum()
            leaves = [leaf_of(parameter) for parameter in self._parameters]
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        return [
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(leaves, gradients, strict=True)
        ]

    def add_clipped(
        self,
        update: Sequence[Tensor],
        into: Sequence[Tensor],
        clip_norm: Tensor | float | None = None,
    ) -> Tensor:
        """into += the user's whole update, scaled and clipped once; returns its norm. Secret.

        Does not wait for the device; an update that is not finite adds nothing.
        """
        if self._scales is not None:
            update = self._scales.times(update)
        forms = [
            (group, Stored(gradients_U=at_least_float32(tensor).contiguous()[None]))
            for group, tensor in zip(self._groups, update, strict=True)
        ]
        with running.wide_arithmetic(into[0].device):
            squared = self._sums.squared_norms(forms, [])
            margin = ROUNDING_MARGIN * torch.finfo(squared.dtype).eps
            factors = clip_factors(squared, self._rule, margin=margin, clip_norm=clip_norm)
            factors = self._sums.scale(factors, largest_norm(self._rule, clip_norm))
            with adding():
                self._sums.add(into, factors)
        return squared.sum().sqrt()
