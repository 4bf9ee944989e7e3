"""A group's mean gradient in another geometry: each coordinate is scaled before it is clipped.

Clipping and noise treat all coordinates alike. Where gradients of some are usually much smaller
than those of others, they drown in the noise. So each coordinate is multiplied by a scale first,
about the inverse of its usual size (scale-then-privatise; Li et al. 2022, AdaDPS; Ganesh et al.
2025, On Design Principles for Private Adaptive Optimizers).

The scales of a step come from what was released before it, or from public records. So they are
public when the step is taken. The scaled gradient is clipped, summed and noised like any other, and
costs the same. Whoever makes the scales keeps their tensors and changes the values in place,
because captured steps on a GPU read them where they are (`userdp.optimizers.scaled_momentum`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from userdp.updates.contract import UpdateRule
from userdp.updates.mean_gradient import mean_gradient

if TYPE_CHECKING:
    from torch import Tensor, nn

    from userdp.losses import Batch, RecordLoss
    from userdp.updates.contract import ClipFunction

# Scales of a trial lie between one over this number and this number.
_TRIED = 4.0


@dataclass(frozen=True, eq=False)
class Scale:
    """What the coordinates of one parameter's gradient are multiplied by, all of them positive.

    That is one factor of the parameter's own shape. Or it is two of a matrix of n rows and m
    columns: one of shape (n, 1) and one of shape (1, m).
    """

    factors: tuple[Tensor, ...]

    @property
    def is_by_row_and_column(self) -> bool:
        """Whether it is one number for each row times one for each column."""
        return len(self.factors) == 2

    def times(self, values: Tensor) -> Tensor:
        """Values of the parameter's shape, or many of them stacked, scaled."""
        for factor in self.factors:
            values = values * factor
        return values

    def over(self, values: Tensor) -> Tensor:
        """The reverse of `times`."""
        for factor in self.factors:
            values = values / factor
        return values


@dataclass(frozen=True, eq=False)
class Scales:
    """The scale of every trained parameter, in the order of `parameters`."""

    parameters: tuple[nn.Parameter, ...]
    scales: tuple[Scale, ...]

    def of(self, parameter: Tensor) -> Scale:
        """The scale of one of the parameters."""
        return next(s for p, s in zip(self.parameters, self.scales, strict=True) if p is parameter)

    def times(self, update: Sequence[Tensor]) -> list[Tensor]:
        """The update, scaled."""
        return [scale.times(t) for scale, t in zip(self.scales, update, strict=True)]

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Inside, all scales are made up: those of a run may all be 1 at first, and hide faults."""
        import torch

        factors = [factor for scale in self.scales for factor in scale.factors]
        before = [factor.clone() for factor in factors]
        generator = torch.Generator().manual_seed(7)
        for factor in factors:
            drawn = torch.rand(factor.shape, generator=generator, dtype=torch.float64)
            factor.copy_(_TRIED ** (2 * drawn - 1))
        try:
            yield
        finally:
            for factor, values in zip(factors, before, strict=True):
                factor.copy_(values)


# Not registered: a plan names the mean gradient, and the optimizer of a run brings the scales.
@dataclass(frozen=True, kw_only=True)
class ScaledGradient(UpdateRule):
    """The gradient of the mean of the records' losses, times the scales."""

    name: ClassVar[str] = "gradient"
    is_mean_gradient: ClassVar[bool] = True
    by: Scales

    @property
    def scales(self) -> Scales:
        """The scales of the next step."""
        return self.by

    def of_group(
        self,
        model: nn.Module,
        parameters: Sequence[Tensor],
        batch: Batch,
        *,
        record_loss: RecordLoss,
        clip: ClipFunction | None = None,
        microbatch_records: int | None = None,
    ) -> list[Tensor]:
        """The mean over the group's own records, scaled."""
        del clip
        return self.by.times(
            mean_gradient(
                model,
                parameters,
                batch,
                record_loss=record_loss,
                microbatch_records=microbatch_records,
            )
        )

    @property
    def words(self) -> str:
        """Nothing: what it costs is what the mean gradient costs."""
        return ""
