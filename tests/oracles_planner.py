"""Noise multipliers straight from the search, for checks of the planner's theory."""

from __future__ import annotations

import numpy as np
from scipy import stats

from userdp.accounting.least_noise import least_noise
from userdp.accounting.steps import Mixture


def noise(group_size: int, rate: float, steps: int, epsilon: float, delta: float = 1e-6) -> float:
    k = np.arange(group_size + 1.0)
    weights = stats.binom.pmf(k, group_size, rate)
    kept = weights > 0
    found = least_noise(
        lambda sigma: [Mixture(noise=sigma, shifts=k[kept], weights=weights[kept], count=steps)],
        epsilon=epsilon,
        delta=delta,
    )
    assert found is not None
    return found.noise_multiplier
