"""Momentum whose gradients are scaled before clipping and noise (`updates.scaled_gradient`).

The scales s are made here, of what is public when a step is taken:

`public`    from gradients of public records, once before the first step: the root mean square of
            each row and of each column of a matrix (AdaDPS, Li et al. 2022)
`private`   from earlier noised gradients, anew after every step: the root mean square of each
            coordinate (Ganesh et al. 2025, On Design Principles for Private Adaptive Optimizers)

A step is w - lr s m / rms(m), where m is the momentum of the noised gradients in their geometry. So
its size is the learning rate, like that of a step of Adam.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from userdp.errors import InputError
from userdp.names.optimizers import SCALES
from userdp.sharded_tensors import is_shard
from userdp.updates.contract import UpdateRule
from userdp.updates.scaled_gradient import Scale, Scales

Source = Literal["private", "public"]
# What is added to the root mean square of a coordinate, relative to that of all: the best of a few
# that were measured (docs/tuning.md).
FLOORS: dict[str, float] = {"private": 1.0, "public": 0.1}
# With smaller ones scales differ by more than the comparison of the two paths can see.
LEAST_FLOOR = 1e-6
# No root mean square counts as smaller, so that no scale is infinite.
_LEAST = 1e-12


class ScaledMomentum(torch.optim.Optimizer):
    """Scales gradients before they are clipped and noised, and follows their momentum.

    It holds all trainable parameters. With `scales="public"`, `train` gives it the gradients of its
    `public` records; a loop of one's own calls `learn` before the first step. `decay` is that of
    the mean square of private gradients. The scales of coordinates whose gradients are small do not
    exceed one over the `floor`, relative to usual ones.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        scales: Source = "private",
        momentum: float = 0.9,
        decay: float = 0.99,
        floor: float | None = None,
        weight_decay: float = 0.0,
    ) -> None:
        if scales not in SCALES:
            raise InputError(f"scales={scales!r}: use {' or '.join(map(repr, SCALES))}.")
        floor = FLOORS[scales] if floor is None else floor
        for name, value in (("momentum", momentum), ("decay", decay)):
            if not 0 <= value < 1:
                raise InputError(f"{name}={value}: give a number from 0 to below 1.")
        if not LEAST_FLOOR <= floor < math.inf:
            raise InputError(f"floor={floor}: give a finite number, {LEAST_FLOOR:g} or more.")
        if not 0 < lr < math.inf:
            raise InputError(f"lr={lr}: give a finite number above 0.")
        if not 0 <= weight_decay < math.inf:
            raise InputError(f"weight_decay={weight_decay}: give a finite number, 0 or more.")
        self.source: Source = scales
        self.momentum, self.decay, self.floor = momentum, decay, floor
        self._scale_of: dict[Tensor, Scale] = {}
        # Saved with the groups: public gradients may be zero, and are not to be learnt from again.
        defaults = {"lr": lr, "weight_decay": weight_decay, "has_learnt": False}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. Their scales are 1 at first."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            shapes = [tuple(parameter.shape)]
            if self.source == "public" and parameter.dim() == 2:
                shapes = [(len(parameter), 1), (1, parameter.shape[1])]
            factors = [torch.ones(shape, device=parameter.device) for shape in shapes]
            self._scale_of[parameter] = Scale(tuple(factors))
            self.state[parameter] = {
                "momentum": torch.zeros_like(parameter, dtype=torch.float32),
                "squares": [torch.zeros_like(factor) for factor in factors],
            }

    def scales_for(self, parameters: Sequence[nn.Parameter]) -> Scales:
        """The scales of these parameters. Their tensors stay, and steps change the values."""
        if any(parameter not in self._scale_of for parameter in parameters):
            raise InputError(
                "the ScaledMomentum lacks trainable parameters of the model: give it all, or "
                "freeze the others."
            )
        return Scales(tuple(parameters), tuple(self._scale_of[p] for p in parameters))

    @property
    def lacks_public(self) -> bool:
        """Whether its scales come from public gradients that it has not been given yet."""
        return self.source == "public" and not self.has_learnt

    @property
    def has_learnt(self) -> bool:
        """Whether it has been given public gradients."""
        return any(group["has_learnt"] for group in self.param_groups)

    def learn(self, gradients: Iterable[Sequence[Tensor | None]]) -> None:
        """Make the scales from public gradients, each a list in the order of the parameters.

        Whoever has something in the records behind them is not protected.
        """
        if not self.lacks_public:
            raise InputError("a ScaledMomentum learns from public gradients once, at most.")
        count = 0
        for found in gradients:
            count += 1
            for parameter, gradient in zip(self._parameters(), found, strict=True):
                if gradient is None:
                    continue
                square = gradient.detach().float().square()
                for running in self.state[parameter]["squares"]:
                    running += _averaged(square, running)
        if not count:
            raise InputError("there are no public gradients to learn from.")
        for parameter in self._parameters():
            for running in self.state[parameter]["squares"]:
                running /= count
        for group in self.param_groups:
            group["has_learnt"] = True
        self._set_scales()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step with the noised gradients, which are those of the scaled geometry."""
        moving = [p for p in self._parameters() if p.grad is not None]
        if not moving:
            return
        for parameter in moving:
            gradient = parameter.grad.float()  # type: ignore[union-attr]
            self.state[parameter]["momentum"].lerp_(gradient, 1 - self.momentum)
            if self.source == "private":
                (squares,) = self.state[parameter]["squares"]
                raw = self._scale_of[parameter].over(gradient)
                squares.lerp_(raw.square(), 1 - self.decay)
        means = [self.state[p]["momentum"].square().mean() for p in moving]
        size = _of_all(moving, means).clamp(min=_LEAST)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                direction = self.state[parameter]["momentum"] / size
                direction = self._scale_of[parameter].times(direction)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_((group["lr"] * direction).to(parameter.dtype))
        if self.source == "private":
            self._set_scales()

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (p for group in self.param_groups for p in group["params"])

    @torch.no_grad()
    def _set_scales(self) -> None:
        """1 / (root mean square + floor), in such units that the scales' own is 1."""
        parameters = list(self._parameters())
        squares = [self.state[p]["squares"] for p in parameters]
        # The mean square of a matrix is the mean of its rows' mean squares.
        usual = _of_all(parameters, [own[0].mean() for own in squares]).clamp(min=_LEAST)
        # A parameter without any gradient so far, such as the first factor of a fresh adapter,
        # counts as a usual one: its gradients may come.
        squares = [
            [torch.where(own[0].any(), square, usual.square()) for square in own] for own in squares
        ]
        means = [own[0].mean() for own in squares]
        sizes: list[Tensor] = []
        for parameter, own, mean in zip(parameters, squares, means, strict=True):
            factors = self._scale_of[parameter].factors
            if len(factors) == 1:
                factors[0].copy_(1 / (own[0].sqrt() + self.floor * usual))
            else:
                # The scale of the whole matrix, times one for each row and one for each column.
                whole = mean.sqrt()
                for factor, square in zip(factors, own, strict=True):
                    factor.copy_(1 / (square.sqrt() / whole + self.floor))
                factors[0].div_(whole + self.floor * usual)
            sizes.append(torch.stack([factor.square().mean() for factor in factors]).prod())
        size = _of_all(parameters, sizes)
        for parameter in parameters:
            self._scale_of[parameter].factors[0].div_(size)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a `state_dict`, bit for bit."""
        super().load_state_dict(state_dict)
        # torch casts what it loads to the dtype of the weights, and keeps no other state.
        for parameter, saved in zip(self._parameters(), state_dict["state"].values(), strict=True):
            to = partial(torch.Tensor.to, device=parameter.device, copy=True)
            own = {"momentum": to(saved["momentum"]), "squares": list(map(to, saved["squares"]))}
            if [s.shape for s in own["squares"]] != [
                factor.shape for factor in self._scale_of[parameter].factors
            ]:
                raise InputError(
                    "the state is that of a ScaledMomentum with scales of another source."
                )
            self.state[parameter] = own
        knows = any(bool(s.any()) for p in self._parameters() for s in self.state[p]["squares"])
        if knows or self.has_learnt:
            self._set_scales()


def _averaged(square: Tensor, like: Tensor) -> Tensor:
    """The mean over those dimensions in which `like` has one place."""
    over = [d for d in range(like.dim()) if like.shape[d] == 1]
    return square.mean(over, keepdim=True) if over else square


def _of_all(parameters: Sequence[Tensor], means: Sequence[Tensor]) -> Tensor:
    """The root mean square of all coordinates, from the mean square of each parameter's."""
    count = sum(p.numel() for p in parameters)
    parts = [p.numel() / count * mean for p, mean in zip(parameters, means, strict=True)]
    return torch.stack(parts).sum().sqrt()


def update_of_run(
    update: UpdateRule, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]
) -> UpdateRule:
    """The plan's update rule, scaled by the optimizer if it is one that scales."""
    if not isinstance(optimizer, ScaledMomentum):
        return update
    if any(is_shard(parameter) for parameter in parameters):
        raise InputError(
            "a ScaledMomentum of a sharded model: its scales need whole weights. Use another "
            "optimizer, or leave out shard."
        )
    return update.scaled_by(optimizer.scales_for(parameters))


def refuse_unlearnt(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a step whose scales come from public gradients that nobody gave."""
    if isinstance(optimizer, ScaledMomentum) and optimizer.lacks_public:
        raise InputError(
            "ScaledMomentum(scales='public') has no public gradients: name public records ([data] "
            "public), or call its learn() before the first step."
        )


LEARNT_BEFORE = (
    "the scales of gradients were learnt before the run, from records that were declared public: "
    "whoever has something in them is not protected"
)


def learnt_before(optimizer: torch.optim.Optimizer) -> list[str]:
    """What a reader must know of an optimizer that was given public gradients before the run."""
    knows = isinstance(optimizer, ScaledMomentum) and optimizer.has_learnt
    return [LEARNT_BEFORE] if knows else []
