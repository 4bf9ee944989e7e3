"""A local step of many users by `torch.func`: any model, each user with a copy of all its weights.

Shapes: U users, B records of a local batch. Everything is secret until noise is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from userdp.clipping.rules import ClipRule
from userdp.clipping.stacked.clip import StackedClip, over
from userdp.losses import Batch, RecordLoss
from userdp.updates.contract import LocalTraining


class Vectorised:
    """The local steps of one model."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        update: LocalTraining,
        clip: StackedClip,
        *,
        record_loss: RecordLoss,
        compute_dtype: torch.dtype | None,
        compiles: bool,
    ) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names = [f"model.{names[id(parameter)]}" for parameter in parameters]
        self._parameters, self._update, self._clip = parameters, update, clip
        self._losses = _Losses(model, record_loss)
        self._compute_dtype, self._compiles = compute_dtype, compiles
        self._step: tuple[type[ClipRule], Callable[..., list[Tensor]]] | None = None

    def step_of(self, rule: ClipRule) -> Callable[..., list[Tensor]]:
        """One local step of all users, compiled on CUDA.

        The clip norm is an argument of the step, so that a rule at another clip norm needs no new
        step.
        """
        if self._step is None or self._step[0] is not type(rule):
            step = partial(self._local_step, rule)
            compiled = torch.compile(step, dynamic=False) if self._compiles else step
            self._step = (type(rule), compiled)
        return self._step[1]

    def _local_step(
        self,
        rule: ClipRule,
        way: list[Tensor],
        start: list[Tensor],
        batch: Batch,
        mask_UB: Tensor,
        acts_U: Tensor,
        clip_norm: Tensor,
    ) -> list[Tensor]:
        """The users' ways after one more local step; who has no batch left stays where it is."""
        theta = [theta_0 + gone for theta_0, gone in zip(start, way, strict=True)]
        weights = {
            name: now.to(parameter.dtype)
            for name, parameter, now in zip(self._names, self._parameters, theta, strict=True)
        }
        dtype = self._compute_dtype
        with (
            torch.autocast(clip_norm.device.type, dtype, enabled=dtype is not None),
            # The other kinds of attention would be computed user by user.
            sdpa_kernel(SDPBackend.MATH),
        ):
            gradients = vmap(grad(self._losses.of_one))(weights, batch, mask_UB)
        moved = [
            self._update.local_step(now, theta_0, gradients[name].to(now.dtype)) - theta_0
            for now, theta_0, name in zip(theta, start, self._names, strict=True)
        ]
        clipped, _ = self._clip.clipped(moved, rule, clip_norm)
        return [
            torch.where(over(acts_U, new), new, old) for new, old in zip(clipped, way, strict=True)
        ]


class _Losses(nn.Module):
    """The mean loss of a local batch, as a module whose weights can be given."""

    def __init__(self, model: nn.Module, record_loss: RecordLoss) -> None:
        super().__init__()
        self.model = model
        self._record_loss = record_loss

    def forward(self, batch: Batch) -> Tensor:
        """One loss per record."""
        return self._record_loss(self.model, batch)

    def of_one(self, weights: dict[str, Tensor], batch: Batch, mask_B: Tensor) -> Tensor:
        """The mean loss of one user's records with these weights; padded rows have mask 0."""
        losses = functional_call(self, weights, (batch,))
        # Not a product: the loss of a padded row may be anything, also not finite.
        return torch.where(mask_B, losses, 0.0).sum() / mask_B.sum().clamp(min=1)
