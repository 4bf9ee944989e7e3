"""Independent Gaussian noise at every step. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from userdp.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Gaussian:
    """Fresh N(0, (sigma * sensitivity)^2) on every coordinate; sigma = `noise_multiplier`.

    Reference: Charles et al. 2024, Alg. 1 and 2.
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0):
            raise InputError(
                f"noise_multiplier={self.noise_multiplier} must be a finite number, 0 or more."
            )

    def noise_stddev(self, sensitivity: float) -> float:
        """The standard deviation on each coordinate of the clipped sum.

        >>> Gaussian(noise_multiplier=2.0).noise_stddev(0.5)
        1.0
        """
        if self.noise_multiplier == 0:
            return 0.0
        return self.noise_multiplier * sensitivity
