"""Delta of runs with next to no noise, or with very much, against integrals over their outputs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from userdp.accounting import accountant, events
from userdp.accounting.special import Floats
from userdp.units import Adjacency

RATE = 0.1


def integrated(noise: float, steps: int, epsilon: float) -> float:
    """Delta of sampled Gaussian steps: hockey-stick divergences, by the trapezoid rule.

    The outputs of a step lie around 0 and 1, so the grid has points there and nowhere else. Where
    outputs are a tenth of noise^2 apart, their losses are a tenth apart.
    """
    near = np.linspace(-9 * noise, 9 * noise, math.ceil(180 / noise) if steps == 1 else 701)
    x = np.concatenate([near, 1 + near])
    width = np.full(len(x), near[1] - near[0])
    q_log = -(x**2) / (2 * noise**2)
    p_log = np.logaddexp(math.log1p(-RATE) + q_log, math.log(RATE) - (x - 1) ** 2 / (2 * noise**2))
    scale = math.log(noise * math.sqrt(2 * math.pi))

    def together(parts: Floats) -> Floats:
        total = parts
        for _ in range(steps - 1):
            total = np.add.outer(total, parts)
        return total.ravel()

    p, q, log_width = together(p_log - scale), together(q_log - scale), together(np.log(width))

    def above(p: Floats, q: Floats) -> float:
        with np.errstate(over="ignore"):
            share = np.where(p - q > epsilon, -np.expm1(np.minimum(epsilon - (p - q), 0.0)), 0.0)
        return float(np.exp(p + log_width) @ share)

    return max(above(p, q), above(q, p))


def bounded(noise: float, steps: int, epsilons: list[float]) -> list[float]:
    step = events.poisson_users_gaussian(user_sampling_prob=RATE, noise_multiplier=noise)
    event = events.repeated(step, steps)
    return accountant.deltas(event, epsilons=epsilons, delta=1e-3, adjacency=Adjacency.ADD_REMOVE)


@pytest.mark.parametrize(
    ("noise", "steps"),
    [
        *((0.01, 2), (1e-3, 1), (1e-3, 2), (1e-4, 2)),
        *(pytest.param(0.03, steps, marks=pytest.mark.slow) for steps in (1, 2)),
    ],
)
def test_delta_of_little_noise_is_that_of_an_integral_from_epsilon_0_on(
    noise: float, steps: int
) -> None:
    # One hit has a loss of about 1 / (2 sigma^2), with a deviation of 1 / sigma.
    hit = 1 / (2 * noise**2)
    epsilons = [0.0, 1.0, hit / 40, hit / 2, *[hit + 1 / noise] * (steps == 1)]
    for epsilon, found in zip(epsilons, bounded(noise, steps, epsilons), strict=True):
        truth = integrated(noise, steps, epsilon)
        assert truth * (1 - 1e-6) <= found <= 1.05 * truth
    assert bounded(noise, steps, [0.0])[0] == pytest.approx(1 - (1 - RATE) ** steps)


@pytest.mark.parametrize("noise", [0.03, 1e-3, 1.0, 1e4])
@pytest.mark.parametrize("share", [0.0, 1e-3, 0.5, 1.0, 1.5])
def test_delta_without_sampling_is_that_of_an_integral(noise: float, share: float) -> None:
    mu = 1 / noise
    epsilon = share * (mu**2 / 2 + mu)
    x = np.linspace(-9, mu + 9, 400_001) if mu < 1 else np.linspace(mu - 9, mu + 9, 400_001)
    loss = mu * x - mu**2 / 2
    density = np.exp(-((x - mu) ** 2) / 2) / math.sqrt(2 * math.pi)
    share_above = np.where(loss > epsilon, -np.expm1(np.minimum(epsilon - loss, 0.0)), 0.0)
    truth = float(density @ share_above) * (x[1] - x[0])
    (found,) = accountant.deltas(
        events.min_separated_gaussian(participations=1, noise_multiplier=noise),
        epsilons=[epsilon], delta=1e-3, adjacency=Adjacency.ADD_REMOVE,
    )  # fmt: skip
    assert found == pytest.approx(truth, rel=1e-4, abs=1e-12)


@pytest.mark.parametrize("noise", [1e5, 1e7, 1e8])
def test_delta_of_much_noise_is_finite_at_every_epsilon(noise: float) -> None:
    found = bounded(noise, 3, [0.0, 1e-9, 1e-6])
    # Three steps move the mean by RATE / noise each, in all by sqrt(3) RATE / noise deviations.
    least = RATE * math.sqrt(3) / noise / math.sqrt(2 * math.pi)
    assert least * 0.99 <= found[0] <= 1 - (1 - RATE) ** 3 + 1e-12
    assert found == sorted(found, reverse=True)
