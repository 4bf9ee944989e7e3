"""What the optimizer makes of the noise: the matrix A from noised gradients to models.

The model after step t is a sum of the gradients so far. For plain descent at a fixed rate all
weights are one: prefix sums. With momentum mu, decay d_t and the share s_t of the full learning
rate at step t,

    m_t = mu m_(t-1) + g_t,     x_t = (1 - d_t) x_(t-1) + s_t m_t,     x = A g.

For an optimizer that also divides by the size of past gradients (Adam), this takes that size to be
constant over the run. A strategy that is chosen for the wrong A costs accuracy and no privacy.

A is never written out: its inverse has three bands, and a product with it is a recurrence.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from userdp.errors import InputError
from userdp.optimizers.schedules import share_of_rate

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The public numbers of an optimizer; by default prefix sums.

    `decay` is the learning rate times the weight decay: the share of the weights that a step at
    full rate takes away, outside of the momentum as in AdamW.

    >>> Workload(steps=3, momentum=0.5).apply(np.eye(3)).tolist()
    [[1.0, 0.0, 0.0], [1.5, 1.0, 0.0], [1.75, 1.5, 1.0]]
    """

    steps: int
    momentum: float = 0.0
    decay: float = 0.0
    schedule: str = "constant"
    warmup_steps: int = 0
    schedule_hold: float = 0.0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InputError(f"steps={self.steps}: train for at least one step.")
        for name, value in (("momentum", self.momentum), ("decay", self.decay)):
            if not 0 <= value < 1:
                raise InputError(f"{name}={value} must be from 0 up to below 1.")
        _shares(self)

    @property
    def is_the_same_at_every_step(self) -> bool:
        """Whether A is Toeplitz: entry (t, s) depends on t - s alone."""
        return self.schedule == "constant" and not self.warmup_steps

    @property
    def shares(self) -> Floats:
        """s_t, the learning rate of each step over the full one."""
        return _shares(self)

    def apply(self, gradients: Floats) -> Floats:
        """A @ `gradients`, a row for every step."""
        models, moment = np.empty_like(gradients), np.zeros_like(gradients[0])
        model = np.zeros_like(gradients[0])
        for step, share in enumerate(self.shares):
            moment = self.momentum * moment + gradients[step]
            model = (1 - self.decay * share) * model + share * moment
            models[step] = model
        return models

    def inverse_columns(self) -> Floats:
        """A^-1 by columns: entry [s, j] is A^-1[s + j, s], for j = 0, 1, 2."""
        shares = self.shares
        kept = 1 - self.decay * shares
        columns = np.zeros((self.steps, 3))
        columns[:, 0] = 1 / shares
        columns[:-1, 1] = -kept[1:] / shares[1:] - self.momentum / shares[:-1]
        columns[:-2, 2] = self.momentum * kept[1:-1] / shares[1:-1]
        return columns if self.momentum else columns[:, :2]


@functools.lru_cache(maxsize=16)
def _shares(workload: Workload) -> Floats:
    share = share_of_rate(
        workload.schedule,
        workload.steps,
        warmup_steps=workload.warmup_steps,
        hold=workload.schedule_hold,
    )
    found = np.array([share(step) for step in range(workload.steps)])
    found.flags.writeable = False
    return found
