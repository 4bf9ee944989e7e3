"""The Gaussian mechanism in closed form: no sampling, any number of steps.

Steps of noise multipliers sigma_i and sensitivity 1 compose to one Gaussian mechanism of
sensitivity mu = sqrt(sum_i 1 / sigma_i^2). In both directions its delta at epsilon is exactly

    delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu).

Reference: Balle and Wang 2018, Thm. 8.
"""

from __future__ import annotations

import math

from userdp.accounting import roots
from userdp.accounting.special import log_normal_cdf


def log_delta(mu: float, epsilon: float) -> float:
    """The log of delta at `epsilon`, for sensitivity `mu` in units of the noise.

    >>> round(math.exp(log_delta(1.0, 1.0)), 4)
    0.1269
    """
    first = log_normal_cdf(mu / 2 - epsilon / mu)
    second = epsilon + log_normal_cdf(-mu / 2 - epsilon / mu)
    if second >= first:
        return -math.inf
    # Both logarithms have rounding errors, which the difference magnifies. They are added.
    error = 1e-15 * (abs(first) + abs(second) + epsilon + 4) / -math.expm1(second - first)
    return first + math.log(-math.expm1(second - first)) + error


def epsilon(mu: float, delta: float) -> float:
    """The least epsilon (to 1e-12, above) at which sensitivity `mu` is (epsilon, delta)-DP.

    >>> round(epsilon(1.0, 1e-6), 4), epsilon(1e-9, 1e-6)
    (4.8866, 0.0)
    """
    target = math.log(delta)
    if mu == 0 or log_delta(mu, 0.0) <= target:
        return 0.0

    def excess(epsilon_: float) -> float:
        return log_delta(mu, epsilon_) - target

    return roots.root(
        excess, *roots.bracket(excess, 1.0, 1.0, growth=2.0, least=0.0), relative=1e-12
    )


def sensitivity(epsilon_: float, delta: float) -> float:
    """The largest `mu` (to 1e-12, below) that is (epsilon, delta)-DP: 1 / mu is the noise to add.

    >>> round(1 / sensitivity(1.0, 1e-6), 4)
    4.2247
    """
    target = math.log(delta)

    # Delta grows with mu, so the safe side is the lower one: the search runs over -log(mu).
    def excess(minus_log: float) -> float:
        return log_delta(math.exp(-minus_log), epsilon_) - target

    missed, met = roots.bracket(excess, 0.0, math.log(2.0))
    return math.exp(-roots.root(excess, missed, met, within=1e-12))
