"""What a noise is: it adds to any part of the clipped sum, at any step, exactly its own numbers.

The clipped sum of all parameters lies in one flat buffer. Noise is drawn by position in it: whoever
holds the values [a, b) draws the noise of these positions and of no others, and it is the same
noise that a single process would draw there. So ranks need not talk to each other about noise.

Public: the parameters. Secret: every number drawn.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from userdp.errors import InputError
from userdp.parts import Part, Registry
from userdp.streams import Streams

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Noise(Part):
    """Noise of a stated size on every coordinate of the clipped sum.

    A subclass is a frozen dataclass that sets `name` and `title`. Calibration chooses the
    `noise_multiplier`, the standard deviation over the norm of one clipped update. A noise that
    must remember something between steps overrides `started`.
    """

    # Said before the parameters in reports.
    title: ClassVar[str]
    # Whether a step's price can be shared with a noisy count (Andrew et al. 2021, Thm. 1). That
    # holds for independent Gaussian noise.
    shares_with_count: ClassVar[bool] = False
    # Whether the noises of two steps are independent. Marks price such noise only.
    is_independent: ClassVar[bool] = True
    # What a statement says that the noise does not protect against.
    not_covered: ClassVar[str] = "attacks on floating-point noise (Mironov 2012) and on timing"
    noise_multiplier: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0):
            raise InputError(
                f"noise_multiplier={self.noise_multiplier} must be a finite number, 0 or more."
            )

    @classmethod
    def configured(
        cls,
        *,
        steps: int,
        separation: int | None = None,
        optimizer: Mapping[str, Any] | None = None,
        **own: Any,
    ) -> Self:
        """The noise of a run of so many steps; `own` are the values of its own `keys`.

        A user comes back after `separation` steps at the earliest, where that is known. `optimizer`
        are the public numbers of what follows the noise (`strategies.workload`). The multiplier is
        chosen later.
        """
        del steps, separation, optimizer
        return cls(noise_multiplier=0.0, **own)

    def check_steps(self, steps: int) -> None:
        """Refuse a run of another length than the noise was made for, if that matters."""
        del steps

    def over(self, steps: int) -> Noise:
        """The noise for another run of so many steps, such as the rest after a fork."""
        del steps
        return self

    def noise_stddev(self, sensitivity: float) -> float:
        """The standard deviation of the numbers drawn, one on each coordinate of the clipped sum.

        Where noise is correlated, the noise of a step is a sum of such numbers (`mixing`).
        """
        if self.noise_multiplier == 0:
            return 0.0
        return self.noise_multiplier * sensitivity

    def mixing(self, steps: int) -> NDArray[np.float64]:
        """The matrix M of the first steps: step t adds sum_s M[t, s] z_s, with z independent.

        For independent noise it is the identity.
        """
        return np.eye(steps)

    @property
    def digest(self) -> str:
        """What names the numbers that are computed from the parameters; empty if there are none.

        A run goes on only with the same ones. With others, its noise at a step that is repeated
        would differ a little from what was released, and the difference would show the noise.
        """
        return ""

    @abstractmethod
    def add_(
        self,
        values: Tensor,
        *,
        offset: int,
        size: int,
        noise_stddev: float,
        step: int,
        streams: Streams,
    ) -> None:
        """Add the noise of one step to `values`, in place.

        `values` are the positions from `offset` on of a flat buffer of `size` numbers.
        """

    def started(self) -> Noise:
        """The noise at the beginning of a run; a new object if it remembers something."""
        return self

    def state_dict(self) -> dict[str, Any]:
        """What it remembers between steps. Secret."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        if state:
            raise InputError(f"{type(self).__name__} remembers nothing between steps.")


NOISES: Registry[Noise] = Registry("noise")
