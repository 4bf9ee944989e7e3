"""What an update rule is: one group of records in, one update out, before any clipping.

A group's update depends on that group alone, whatever else is in the step. The clip rule decides
how large it may be, so an update rule needs no price of its own. A rule with a `halting_test` has
one (`prices/table.py`): which groups count then depends on all of them.

torch is needed only to compute an update.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from userdp.errors import InputError
from userdp.parts import Part, Registry
from userdp.updates.estimators import Estimator, FixedDenominator
from userdp.updates.halting import HaltingTest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from userdp.losses import Batch, RecordLoss
    from userdp.updates.scaled_gradient import Scales

    ClipFunction = Callable[[Sequence[Tensor]], list[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Local steps are theta - rate (gradient + penalty (theta - theta_0)), before clipping."""

    rate: float
    penalty: float


class LocalTraining(Protocol):
    """Steps of a group on its own records, as a vectorised program needs them."""

    @property
    def local_epochs(self) -> int:
        """Passes over the group's records."""
        ...

    @property
    def local_batch_size(self) -> int:
        """Records of one local step."""
        ...

    def local_step(self, theta: Tensor, theta_0: Tensor, gradient: Tensor) -> Tensor:
        """The weights after one more local step, before the way from `theta_0` is clipped."""
        ...

    @property
    def descent(self) -> Descent | None:
        """The local step in numbers, for programs that write it out; None if it is another."""
        ...

    def weight(self, num_records: int) -> float:
        """How much a group of so many records counts."""
        ...


class UpdateRule(Part):
    """Turns the records of a group into one tensor per trainable parameter.

    A subclass is a frozen dataclass that sets `name`.
    """

    # The fast path computes the mean gradients of many groups at once (`clipping.fast`).
    is_mean_gradient: ClassVar[bool] = False
    # Every user is in every step, so that is the cohort where none is given.
    takes_everybody: ClassVar[bool] = False

    @abstractmethod
    def of_group(
        self,
        model: nn.Module,
        parameters: Sequence[Tensor],
        batch: Batch,
        *,
        record_loss: RecordLoss,
        clip: ClipFunction,
        microbatch_records: int | None = None,
    ) -> list[Tensor]:
        """The group's update in float32 or better; the model and its gradients stay as they are.

        `clip` is the step's ClipFn, for a rule that clips on the way. What is returned is clipped
        again, whatever it is.
        """

    def scaled_by(self, scales: Scales) -> UpdateRule:
        """The rule whose updates are multiplied by these scales."""
        del scales
        raise InputError(
            f"a ScaledMomentum scales gradients, and the update is {self.name!r}: use another "
            "optimizer, or update = 'gradient'."
        )

    @property
    def scales(self) -> Scales | None:
        """What each coordinate of a mean gradient is multiplied by; None if it stays as it is."""
        return None

    @property
    def local_training(self) -> LocalTraining | None:
        """The local training that gives the update, which many groups can do at once; else None."""
        return None

    def weight(self, num_records: int) -> float:
        """How much a group of this many records counts: at most 1, which its bound rests on."""
        del num_records
        return 1.0

    def averaging(self, *, num_users: int, expected_groups: float) -> Estimator:
        """How the average is estimated from the sum, and how far one group then moves it."""
        del num_users, expected_groups
        return FixedDenominator()

    def halting_test(self, *, num_users: int, steps: int) -> HaltingTest | None:
        """The test that every step of a run must pass; None if there is none."""
        del num_users, steps
        return None


UPDATE_RULES: Registry[UpdateRule] = Registry("update")


def refuse_public(update: UpdateRule) -> None:
    """Refuse public records beside local training: their gradient has another scale."""
    if update.local_training is not None:
        raise InputError(
            f"update = {update.name!r} gives how far the weights moved, and [data] public would "
            "mix in a gradient, whose scale is another. Leave out public, or set update = "
            "'gradient'."
        )
