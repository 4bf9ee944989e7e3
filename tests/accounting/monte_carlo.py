"""Random allocation priced by simulation: balls in bins, and balanced iteration sampling.

Every user takes part in exactly k of T steps, a uniformly random k (k = 1: balls in bins). Then
steps are not independent and no closed form is known; the worst pair is

    Q = N(0, sigma^2 I_T),   P = N(1_S, sigma^2 I_T), S a random k-subset of the T steps,

with loss l(x) = log e_k(y) / C(T, k), y_t = exp((2 x_t - 1) / (2 sigma^2)), e_k the elementary
symmetric polynomial. delta(epsilon) is the mean of (1 - e^(epsilon - l))+, a number in [0, 1], so a
sample of it gives an upper bound that holds with a stated confidence. That is weaker than a proof:
results carry the confidence, and no `DpEvent` is made from them.

At low noise this is stronger than Poisson sampling at the same rate, which may pick a user often.
Reference: Chua et al. 2025 (balls and bins, arXiv 2412.16802); Feldman and Shenfeld 2025 (random
allocation, arXiv 2502.08202).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from userdp.accounting.special import Floats, gammaln
from userdp.errors import InputError

_BLOCK = 1 << 22
_GRID = 64


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """An epsilon that holds with probability `confidence` over the simulation's own randomness."""

    epsilon: float
    delta: float
    confidence: float
    samples: int

    @property
    def certified_by(self) -> str:
        """How this number came about: not a proof."""
        return (
            f"Monte Carlo, {self.samples:,} samples, confidence {self.confidence:g}: an "
            "estimate with a confidence bound, not a certificate"
        )


def allocation_losses(
    *,
    steps: int,
    participations: int,
    noise_multiplier: float,
    epochs: int,
    samples: int,
    remove: bool,
    rng: np.random.Generator,
) -> Floats:
    """Sampled losses of `epochs` independent allocations, in the "remove" or "add" direction."""
    total = np.zeros(samples)
    rows = max(1, _BLOCK // steps)
    log_ways = (
        gammaln(steps + 1) - gammaln(participations + 1) - gammaln(steps - participations + 1)
    )
    for _ in range(epochs):
        for first in range(0, samples, rows):
            block = min(rows, samples - first)
            x = rng.normal(scale=noise_multiplier, size=(block, steps))
            if remove:
                # By symmetry the first k steps stand for any k.
                x[:, :participations] += 1.0
            log_y = (2 * x - 1) / (2 * noise_multiplier**2)
            loss = _log_symmetric(log_y, participations) - log_ways
            total[first : first + block] += loss if remove else -loss
    return total


def _log_symmetric(log_y: Floats, degree: int) -> Floats:
    """log e_k of each row: e_j <- e_j + y e_(j - 1), one y at a time."""
    if degree == 1:
        peak = log_y.max(axis=1)
        return peak + np.log(np.exp(log_y - peak[:, None]).sum(axis=1))
    sums = np.full((log_y.shape[0], degree + 1), -np.inf)
    sums[:, 0] = 0.0
    for column in log_y.T:
        sums[:, 1:] = np.logaddexp(sums[:, 1:], sums[:, :-1] + column[:, None])
    return sums[:, -1]


def allocation_epsilon(
    *,
    steps: int,
    participations: int = 1,
    noise_multiplier: float,
    delta: float,
    epochs: int = 1,
    samples: int = 100_000,
    confidence: float = 0.999,
    rng: np.random.Generator,
) -> Simulated:
    """An epsilon for random allocation, holding with `confidence`.

    T = `steps` per epoch, k = `participations` per epoch, sigma = `noise_multiplier`. Each
    direction's mean of (1 - e^(epsilon - l))+ is bounded at 64 epsilons by the empirical Bernstein
    bound of Maurer and Pontil 2009, with a union bound over all of them.

    >>> found = allocation_epsilon(
    ...     steps=20, noise_multiplier=1.0, delta=0.01, samples=20000, rng=np.random.default_rng(0))
    >>> 0.4 < found.epsilon < 1.5
    True
    """
    if not 1 <= participations <= steps:
        raise InputError(f"participations={participations} of {steps} steps: give 1 to {steps}.")
    failure = (1 - confidence) / (2 * _GRID)
    least = 7 * math.log(2 / failure) / (3 * (samples - 1))
    if delta <= least:
        raise InputError(
            f"delta={delta:g} cannot be bounded with {samples:,} samples at confidence "
            f"{confidence:g}: the bound is never below {least:.2g}. Use about "
            f"{math.ceil(samples * least / delta * 2):,} samples, or Poisson sampling, "
            "which is priced exactly."
        )
    worst = 0.0
    for remove in (True, False):
        losses = allocation_losses(
            steps=steps,
            participations=participations,
            noise_multiplier=noise_multiplier,
            epochs=epochs,
            samples=samples,
            remove=remove,
            rng=rng,
        )
        # The grid may not depend on the sample: it is geometric and fixed.
        for epsilon in np.geomspace(1e-2, 1e3, _GRID):
            values = -np.expm1(np.minimum(epsilon - losses, 0.0))
            spread = math.sqrt(2 * float(values.var(ddof=1)) * math.log(2 / failure) / samples)
            if float(values.mean()) + spread + least <= delta:
                worst = max(worst, float(epsilon))
                break
        else:
            worst = math.inf
    return Simulated(epsilon=worst, delta=delta, confidence=confidence, samples=samples)
