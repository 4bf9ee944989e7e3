"""What an update rule is: one group of records in, one update out, before any clipping.

A group's update depends on that group alone, whatever else is in the step. The clip rule decides
how large it may be, so an update rule needs no price of its own. A rule with a `halting_test` has
one (`prices.py`): which groups count then depends on all of them.

torch is needed only to compute an update.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from userdp.parts import Part, Registry
from userdp.updates.halting import HaltingTest

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

    def halting_test(self, *, num_users: int, steps: int) -> HaltingTest | None:
        """The test that every step of a run must pass; None if there is none."""
        del num_users, steps
        return None


UPDATE_RULES: Registry[UpdateRule] = Registry("update")
