"""The mean gradient of a group's records.

Reference: Charles et al. 2024, Alg. 2 (g_u); McMahan et al. 2018, UserUpdateFedSGD.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from userdp.errors import MixedExamplesError
from userdp.updates.contract import UPDATE_RULES, UpdateRule

if TYPE_CHECKING:
    from torch import Tensor, nn

    from userdp.losses import Batch, RecordLoss
    from userdp.updates.contract import ClipFunction
    from userdp.updates.scaled_gradient import Scales


@UPDATE_RULES.register
@dataclass(frozen=True, kw_only=True)
class MeanGradient(UpdateRule):
    """The gradient of the mean of the records' losses."""

    name: ClassVar[str] = "gradient"
    is_mean_gradient: ClassVar[bool] = True

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
        """The mean over the group's own records, in microbatches if a size is given."""
        del clip
        return mean_gradient(
            model,
            parameters,
            batch,
            record_loss=record_loss,
            microbatch_records=microbatch_records,
        )

    def scaled_by(self, scales: Scales) -> UpdateRule:
        """The scaled gradient."""
        from userdp.updates.scaled_gradient import ScaledGradient

        return ScaledGradient(by=scales)

    @property
    def words(self) -> str:
        """Nothing: every statement takes the mean gradient for granted."""
        return ""


MEAN_GRADIENT = MeanGradient()


def mean_gradient(
    model: nn.Module,
    parameters: Sequence[Tensor],
    batch: Batch,
    *,
    record_loss: RecordLoss | None = None,
    microbatch_records: int | None = None,
) -> list[Tensor]:
    """The gradient of the mean of the records' losses, in float32 or better.

    `.grad` is never touched. A parameter that the loss does not reach gets zero. If the group has
    no record, the whole update is zero: a user whose texts leave no token to predict is drawn like
    any other.
    """
    # Imported here, because a plan names this rule and must load without torch.
    import torch

    from userdp.losses import causal_lm_loss, records_in, wide_dtype

    def zeros(parameter: Tensor) -> Tensor:
        return torch.zeros_like(parameter, dtype=wide_dtype(parameter.dtype))

    record_loss = record_loss or causal_lm_loss
    num_records = records_in(batch)
    update: list[Tensor] = []
    size = microbatch_records or max(num_records, 1)
    for start in range(0, num_records, size):
        stop = start + size
        part = {name: tensor[start:stop] for name, tensor in batch.items()}
        losses = record_loss(model, part)
        if losses.shape != (records_in(part),):
            raise MixedExamplesError(
                f"the loss has shape {tuple(losses.shape)}, not one value per record: a mean over "
                "the batch would mix records before the group is formed. Return one loss per "
                "record."
            )
        mean = losses.sum() / num_records
        gradients: list[Tensor | None] = [*torch.autograd.grad(mean, parameters, allow_unused=True)]
        # All gradients are as large as the model, and so is the update. So each gradient is let go
        # once it is added, and the first ones make room for the update's tensors.
        for place, parameter in enumerate(parameters):
            gradient, gradients[place] = gradients[place], None
            if start == 0:
                update.append(zeros(parameter))
            if gradient is not None:
                update[place] += gradient
    return update or [zeros(parameter) for parameter in parameters]
