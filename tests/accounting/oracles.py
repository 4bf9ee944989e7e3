"""Numbers from elsewhere than the code under test: quadrature, dp_accounting's lower bound."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import integrate, optimize, stats

from userdp.accounting.steps import Mixture


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


def lower_epsilon(mixture: Mixture, delta: float, near: float) -> float:
    """A lower bound on epsilon, for an epsilon of about `near`.

    For users, dp_accounting's optimistic estimate. For mixtures that estimate is no bound in 0.6.0
    (noise 23.18, Binomial(48, 0.036), 284 steps, delta 4.6e-7: "optimistic" 7.88, its own
    connect-the-dots 6.675), so the outputs are merged into cells, which is post-processing, and the
    cells' losses rounded down.
    """
    spacing = 2e-3 * near / mixture.count
    if len(mixture.shifts) == 2 and mixture.shifts[1] == 1.0:
        one = pld.from_gaussian_mechanism(
            mixture.noise,
            sampling_prob=float(mixture.weights[1]),
            pessimistic_estimate=False,
            use_connect_dots=False,
            value_discretization_interval=max(spacing, 1e-4),
        )
        return float(one.self_compose(mixture.count).get_epsilon_for_delta(delta))
    noise, shifts, weights = mixture.noise, mixture.shifts, mixture.weights
    edges = np.linspace(-9 * noise, float(weights @ shifts) + 12 * noise + 8, 20_001)
    p = sum(
        w * np.diff(stats.norm.cdf(edges, c, noise)) for c, w in zip(shifts, weights, strict=True)
    )
    q = np.diff(stats.norm.cdf(edges, 0.0, noise))
    # Far out the cell masses are differences of nearly 1; leaving cells out only lowers delta.
    kept = (p > 1e-14) & (q > 1e-14)
    return max(
        _floored_epsilon(np.log(p[kept] / q[kept]), p[kept], mixture.count, delta, spacing, near),
        _floored_epsilon(np.log(q[kept] / p[kept]), q[kept], mixture.count, delta, spacing, near),
    )


def _floored_epsilon(loss, mass, count, delta, spacing, near) -> float:
    index = np.floor(loss / spacing).astype(np.int64)
    lowest = int(index.min())
    length = 1 << 23
    spectrum = np.fft.rfft(np.bincount((index - lowest) % length, mass, minlength=length))
    composed = np.fft.irfft(spectrum**count, length)
    at = count * lowest + np.arange(length)
    # The window is centred on epsilon: it holds all but a negligible part of the sum.
    start = int(near / spacing) - length // 2
    total = spacing * (start + (at - start) % length)

    def delta_at(epsilon: float) -> float:
        over = total > epsilon
        return float(composed[over] @ -np.expm1(epsilon - total[over]))

    low, high = 0.0, 2 * near
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return low


def hockey_stick(one, other, epsilon: float, points=()) -> float:
    """The mean of (one - e^epsilon other)+, integrated."""

    def gap(x: float) -> float:
        return max(0.0, one(x) - math.exp(epsilon) * other(x))

    ends = [-40.0, *sorted(points), 40.0]
    parts = [integrate.quad(gap, *pair, limit=400)[0] for pair in pairwise(ends)]
    return sum(parts)
