"""How updates are clipped, and how far one user can then move their sum. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from userdp.errors import InputError
from userdp.units import Adjacency


@dataclass(frozen=True, kw_only=True)
class FlatClip:
    """Scale a whole update so that its L2 norm is at most S: pi(D, S) = D * min(1, S / ||D||).

    S = `clip_norm`, D the update over all trainable parameters together.
    Reference: McMahan et al. 2018, Eq. 1 (FlatClip).
    """

    clip_norm: float

    def __post_init__(self) -> None:
        if not self.clip_norm > 0:
            raise InputError(f"clip_norm={self.clip_norm} must be above 0.")

    @property
    def bounds_updates(self) -> bool:
        """Whether there is a bound at all: an infinite clip norm clips nothing."""
        return math.isfinite(self.clip_norm)

    def sensitivity(self, adjacency: Adjacency) -> float:
        """How far the clipped sum moves between neighbours, per update the user contributes.

        >>> FlatClip(clip_norm=0.5).sensitivity(Adjacency.ADD_REMOVE)
        0.5
        """
        return adjacency.sensitivity_factor * self.clip_norm
