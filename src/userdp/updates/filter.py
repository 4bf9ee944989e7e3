"""Mean gradients behind the filter of Asi & Liu: outliers are left out, or the run halts.

Every user's clipped mean gradient is kept. A noised score says whether most of them lie within tau
of each other. If so, users with few others nearby are left out, and the mean of the rest gets noise
in proportion to tau, not to the clip norm. If not, the run ends. It pays only where tau is far
below the clip norm (`userdp.planner.filter_noise.effective_noise`).

Reference: Chua et al. 2024, App. A, Alg. 3; Asi and Liu 2024.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from userdp.errors import InputError
from userdp.updates.contract import UPDATE_RULES, UpdateRule
from userdp.updates.halting import HaltingTest
from userdp.updates.mean_gradient import mean_gradient

if TYPE_CHECKING:
    from torch import Tensor, nn

    from userdp.losses import Batch, RecordLoss
    from userdp.updates.contract import ClipFunction


@UPDATE_RULES.register
@dataclass(frozen=True, kw_only=True)
class Filter(UpdateRule):
    """A user's mean gradient, which counts if enough others are close to it.

    `concentration` is tau over the clip norm, and `threshold` the share of the users that must be
    close to each other, 4/5 in the paper. `threshold_epsilon` and `threshold_delta` are spent on
    the test over the whole run. `memory_gib` is what the kept gradients may take.
    """

    name: ClassVar[str] = "filter"
    takes_everybody: ClassVar[bool] = True
    keys: ClassVar[Mapping[str, str]] = {
        "concentration": "concentration",
        "threshold": "threshold",
        "threshold_epsilon": "threshold_epsilon",
        "threshold_delta": "threshold_delta",
        "memory_gib": "memory_gib",
    }
    concentration: float = 0.1
    threshold: float = 0.8
    threshold_epsilon: float = 1.0
    threshold_delta: float = 1e-7
    memory_gib: float = 4.0

    def __post_init__(self) -> None:
        for name in ("concentration", "threshold", "threshold_epsilon", "memory_gib"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise InputError(f"{name}={value} of the filter must be a finite number above 0.")
        if not self.threshold < 1:
            raise InputError(f"threshold={self.threshold} of the filter must be below 1.")
        if not 0 < self.threshold_delta < 1:
            raise InputError(f"threshold_delta={self.threshold_delta} is not a probability.")

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
        """The mean gradient of the group's records."""
        del clip
        return mean_gradient(
            model,
            parameters,
            batch,
            record_loss=record_loss,
            microbatch_records=microbatch_records,
        )

    def halting_test(self, *, num_users: int, steps: int) -> HaltingTest:
        """The test that every step must pass."""
        return HaltingTest(
            num_users=num_users,
            steps=steps,
            concentration=self.concentration,
            threshold=self.threshold,
            epsilon=self.threshold_epsilon,
            delta=self.threshold_delta,
            memory_gib=self.memory_gib,
        )

    @property
    def words(self) -> str:
        """What must be close, and what the test costs."""
        # All its digits, as it was asked for.
        target = self.threshold_epsilon
        return (
            f"filter of Asi & Liu (concentration={self.concentration:g} clip norms, threshold="
            f"{self.threshold:g}, threshold_epsilon={target!r}, threshold_delta="
            f"{self.threshold_delta:g}, at most {self.memory_gib:g} GiB of gradients)"
        )
