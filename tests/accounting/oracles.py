"""Numbers from elsewhere than the code under test: quadrature, dp_accounting's lower bound."""

from __future__ import annotations

import numpy as np
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import integrate, optimize, stats

from userdp.accounting.search import Mixture


def binomial(noise: float, group_size: int, rate: float, count: int) -> Mixture:
    k = np.arange(group_size + 1.0)
    weights = stats.binom.pmf(k, group_size, rate)
    kept = weights > 0
    return Mixture(noise=noise, shifts=k[kept], weights=weights[kept], count=count)


def one_step_delta(mixture: Mixture, epsilon: float) -> float:
    """The worse direction's hockey-stick divergence, integrated from its change of sign."""
    noise, shifts, weights = mixture.noise, mixture.shifts, mixture.weights

    def p(x: float) -> float:
        return float(weights @ stats.norm.pdf(x, shifts, noise))

    def q(x: float) -> float:
        return float(stats.norm.pdf(x, 0.0, noise))

    reach = float(shifts[-1]) + 30 * noise
    found: list[float] = []
    for first, second, sign in ((p, q, 1.0), (q, p, -1.0)):

        def gap(x: float, first=first, second=second) -> float:
            return first(x) - np.exp(epsilon) * second(x)

        # The likelihood ratio is monotone, so there is one change of sign at most.
        low, high = -10 * noise, reach
        if gap(low) * gap(high) >= 0:
            found.append(max(0.0, 1 - np.exp(epsilon)) if gap(0.0) > 0 else 0.0)
            continue
        at = optimize.brentq(gap, low, high, xtol=1e-13)
        ends = (at, reach) if sign > 0 else (-12 * noise, at)
        points = [s for s in shifts if ends[0] < s < ends[1]][:40]
        value, _ = integrate.quad(
            gap, *ends, points=points or None, limit=500, epsabs=0, epsrel=1e-11
        )
        found.append(value)
    return max(found)


def lower_epsilon(mixture: Mixture, delta: float, interval: float) -> float:
    """dp_accounting's optimistic estimate: a lower bound on epsilon."""
    if len(mixture.shifts) == 2 and mixture.shifts[1] == 1.0:
        one = pld.from_gaussian_mechanism(
            mixture.noise,
            sampling_prob=float(mixture.weights[1]),
            pessimistic_estimate=False,
            use_connect_dots=False,
            value_discretization_interval=interval,
        )
    else:
        one = pld.from_mixture_gaussian_mechanism(
            mixture.noise,
            mixture.shifts.tolist(),
            (mixture.weights / mixture.weights.sum()).tolist(),
            pessimistic_estimate=False,
            use_connect_dots=False,
            value_discretization_interval=interval,
        )
    return float(one.self_compose(mixture.count).get_epsilon_for_delta(delta))
