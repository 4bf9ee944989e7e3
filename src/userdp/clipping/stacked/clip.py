"""Clips the updates of users who stand side by side, each user's by its own norm.

A parameter's update is a tensor (user, ...). Secret until noise is added.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from userdp.clipping.factors import ROUNDING_MARGIN, clip_factors
from userdp.clipping.layer_groups import Layers
from userdp.clipping.rules import ClipRule


class StackedClip:
    """The clipping of one model's stacked updates. `use` says the rule of the present sum."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._layers = Layers(model, parameters)
        # By the rule of the present sum: compiled code reads plain numbers.
        self._numbers: list[int] = []

    def use(self, rule: ClipRule) -> None:
        """From now on, updates are clipped by this rule, or by it at another clip norm."""
        self._numbers = self._layers.by(rule)

    def factors(
        self, squares: Tensor, rule: ClipRule, eps: float, clip_norm: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """From squared norms (parameters, users): their factors, and the norms (layers, users).

        For a flat rule the norms may be those of any parts of the parameters.
        """
        # Rows are picked one by one: a list of numbers would have to travel to the device first.
        layers = self._numbers if rule.by_layer else [0] * len(squares)
        members = [
            [squares[place] for place, layer in enumerate(layers) if layer == number]
            for number in range(max(layers) + 1)
        ]
        squared = torch.stack([torch.stack(own).sum(0) for own in members])
        factors = clip_factors(squared, rule, margin=ROUNDING_MARGIN * eps, clip_norm=clip_norm)
        return torch.stack([factors[layer] for layer in layers]), squared

    def clipped(
        self, updates: list[Tensor], rule: ClipRule, clip_norm: Tensor | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """Each user's update scaled to the rule's bound, and the squared norms (layers, users).

        `clip_norm` is the rule's own where it lives on the device: compiled code reads it there.
        """
        squares = torch.stack(
            [
                torch.linalg.vector_norm(t.flatten(1), dim=1, dtype=torch.float64).square()
                for t in updates
            ]
        )
        eps = max(torch.finfo(tensor.dtype).eps for tensor in updates)
        factors, squared = self.factors(squares, rule, eps, clip_norm)
        scaled = [
            torch.where(
                over(factor > 0, tensor), tensor * over(factor.to(tensor.dtype), tensor), 0.0
            )
            for factor, tensor in zip(factors, updates, strict=True)
        ]
        return scaled, squared


def over(values_U: Tensor, like: Tensor) -> Tensor:
    """One value a user, to be combined with the users' tensors."""
    return values_U.view(-1, *[1] * (like.dim() - 1))
