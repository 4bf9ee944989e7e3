"""What one probe saw: how far one user moved the clipped sum, and whether that is explained."""

from __future__ import annotations

from dataclasses import dataclass

# How far a sum may move in total, and how far beyond the user's own update, in clip norms. Rounding
# in float32 explains this much on any device.
MOST_MOVEMENT = 1 + 1e-4
MOST_COUPLING = 1e-3


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One cohort with and without one user. All numbers are in clip norms.

    `movement` is how far the sum moves. `coupling` is the part of it that is not the user's own
    update.
    """

    name: str
    movement: float
    coupling: float
    allowed_coupling: float

    @property
    def safe(self) -> bool:
        """Whether rounding explains everything that is not the user's own update."""
        moves_little = self.movement <= MOST_MOVEMENT + max(
            0.0, self.allowed_coupling - MOST_COUPLING
        )
        return moves_little and self.coupling <= self.allowed_coupling
