"""What an update rule is: one group of records in, one update out, before any clipping.

A group's update depends on that group alone, whatever else is in the step. The clip rule decides
how large it may be, so an update rule needs no price of its own.

torch is needed only to compute an update.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from userdp.parts import Part, Registry

if TYPE_CHECKING:
    from torch import Tensor, nn

    from userdp.losses import Batch, RecordLoss


class UpdateRule(Part):
    """Turns the records of a group into one tensor per trainable parameter.

    A subclass is a frozen dataclass that sets `name`.
    """

    # The fast path computes the mean gradients of many groups at once. Other updates are computed
    # group by group.
    is_mean_gradient: ClassVar[bool] = False

    @abstractmethod
    def of_group(
        self,
        model: nn.Module,
        parameters: Sequence[Tensor],
        batch: Batch,
        *,
        record_loss: RecordLoss,
        microbatch_records: int | None = None,
    ) -> list[Tensor]:
        """The group's update in float32 or better; the model and its gradients stay as they are."""


UPDATE_RULES: Registry[UpdateRule] = Registry("update")
