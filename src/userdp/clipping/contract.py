"""What a clip rule is: its equation, from the norm of an update to the factor. Needs no torch.

`clip_norm` is an argument of the equation because an adaptive rule changes it from step to step,
and a captured GPU step reads it from the device. `share` is the part of the bound that an update
may use up: a little less than 1, so that rounding cannot carry it over the bound.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from userdp.errors import InputError
from userdp.parts import Part, Registry

# The square of a norm, and a factor between it and the largest norm, must be numbers of float32.
SMALLEST_NORM = 1e-15


class ClipRule(Part):
    """From the norm of an update to its factor.

    A subclass is a frozen dataclass that sets `name` and has `clip_norm` and `bound`.

    Guarantee that every subclass must keep: factor(norm, clip_norm, share) * norm is at most
    share * bound_at(clip_norm), for every norm.
    """

    # Whether each layer is clipped on its own, to its share of the bound (`shares`).
    by_layer: ClassVar[bool] = False
    # Whether clipping twice is clipping once, as it is for a projection. Local training clips after
    # every local step.
    is_projection: ClassVar[bool] = False
    clip_norm: float

    @abstractmethod
    def factor(self, norms: Any, clip_norm: Any, share: float) -> Any:
        """What updates of these norms (an array) are multiplied by."""

    @abstractmethod
    def bound_at(self, clip_norm: Any) -> Any:
        """The largest norm a clipped update can have where the clip norm is this one."""

    def shares(self, count: int) -> tuple[float, ...]:
        """S_j / S of each of `count` layers; their squares must sum to 1. By default equal."""
        return (1 / math.sqrt(count),) * count

    def vectors(self, names: Sequence[str]) -> list[int] | None:
        """The number of each parameter's layer, by its name; None: a module is a layer."""
        return None

    @property
    def bound(self) -> float:
        """The largest norm a clipped update can have."""
        return self.bound_at(self.clip_norm)

    @property
    def bounds_updates(self) -> bool:
        """Whether there is a bound at all: an infinite clip norm clips nothing."""
        return math.isfinite(self.clip_norm)

    @property
    def changes(self) -> bool:
        """Whether the clip norm can be another one at another step."""
        return self.count_stddev is not None

    @property
    def last_phase(self) -> int:
        """The step that its last phase begins with: 0 where it has no phases."""
        return 0

    def begun_at(self, step: int) -> dict[str, float]:
        """What the ledger's row of this step says, if a phase of the rule begins with it."""
        del step
        return {}

    @property
    def count_stddev(self) -> float | None:
        """The noise on the count of unclipped updates that each step releases; None if it does not.

        A step's price covers this count: the sum gets more noise for it (`Plan.noise_stddev`).
        """
        return None

    def following(self, noisy_share_within: float | None) -> ClipRule:
        """The rule of the next step; None is given where no count is released."""
        return self

    def at(self, clip_norm: float) -> ClipRule:
        """The same rule with another clip norm; itself if it has none to choose."""
        return replace(self, clip_norm=clip_norm)  # pyright: ignore


CLIP_RULES: Registry[ClipRule] = Registry("clipping")


def check_size(name: str, value: float) -> None:
    """Refuse a norm whose square float32 cannot hold."""
    if not value >= SMALLEST_NORM:
        raise InputError(
            f"{name}={value} must be at least {SMALLEST_NORM:g}: squares of smaller norms have no "
            "place in float32."
        )


def check_positive(name: str, value: float) -> None:
    """Refuse a number that is not above 0."""
    if not value > 0:
        raise InputError(f"{name}={value} must be above 0.")
