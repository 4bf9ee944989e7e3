"""The price of tuning: every run on the users' data counts, also the discarded ones.

There are two ways to tune. Either all runs are composed (`swept`). Or their number is random and
only the best one is looked at (`randomly_stopped`), which costs about two to three runs, however
many there were.

Public: the distribution of the number of runs, and the best run's result. Secret: how many runs
there were, and what the others gave.
"""

from __future__ import annotations

import math

import numpy as np
from dp_accounting import dp_event

from userdp.accounting import roots
from userdp.accounting.events import DpEvent, repeated
from userdp.errors import InputError

# Shapes of the number of runs: Papernot and Steinke 2022, Sec. 3.
GEOMETRIC, LOGARITHMIC, POISSON = 1.0, 0.0, float("inf")

# A uniform draw has 53 bits, and cannot resolve smaller chances.
_NEVER = 1e-18


def swept(run: DpEvent, runs: int) -> DpEvent:
    """`runs` runs on the same users, where the results of all of them were seen.

    >>> swept(dp_event.GaussianDpEvent(2.0), 10).count
    10
    """
    if runs < 1:
        raise InputError(f"runs={runs}: give at least one.")
    return repeated(run, runs)


def randomly_stopped(run: DpEvent, *, mean_runs: float, shape: float = GEOMETRIC) -> DpEvent:
    """The best of a random number of runs, drawn from a truncated negative binomial distribution.

    Each run draws its hyper-parameters at random, and only the best run's result is released.
    `shape` is 1 for the geometric distribution, 0 for the logarithmic, infinity for the Poisson.
    `number_of_runs` draws the number. RDP prices this event; `rdp_and_pld` prices it together with
    other mechanisms.
    Reference: Papernot and Steinke 2022 (arXiv 2110.03620), Thm. 2 and 6.

    >>> randomly_stopped(dp_event.GaussianDpEvent(2.0), mean_runs=10.0).mean
    10.0
    """
    _check(mean_runs, shape)
    return dp_event.RepeatAndSelectDpEvent(run, mean_runs, shape)


def number_of_runs(*, mean_runs: float, shape: float = GEOMETRIC, rng: np.random.Generator) -> int:
    """How many runs to make: a draw from the distribution that `randomly_stopped` prices.

    With eta = `shape` and gamma such that the mean is `mean_runs`,
    P(K = k) ~ (1 - gamma)^k prod_{l<k} (l + eta) / (l + 1) for k = 1, 2, ... Only the Poisson
    distribution may also give 0, and then nothing is released. Neither the number nor `rng`'s seed
    may be told.
    Reference: Papernot and Steinke 2022, Def. 1 and Sec. 3.2.

    >>> number_of_runs(mean_runs=1.0, rng=np.random.default_rng(0))
    1
    """
    _check(mean_runs, shape)
    if math.isinf(shape):
        return int(rng.poisson(mean_runs))
    gamma = _stopping_probability(mean_runs, shape)
    if shape == LOGARITHMIC:
        chance = (1 - gamma) / -math.log(gamma)
    else:
        chance = shape * (1 - gamma) / math.expm1(-shape * math.log(gamma))
    # Inversion: add up the probabilities until they exceed a uniform draw.
    drawn, runs = rng.random(), 1
    # Before the mean a small chance is not yet the end of the distribution.
    while drawn >= chance and (chance > _NEVER or runs < mean_runs):
        drawn -= chance
        chance *= (1 - gamma) * (runs + shape) / (runs + 1)
        runs += 1
    return runs


def _mean_runs(gamma: float, shape: float) -> float:
    """The mean of the truncated negative binomial: Papernot and Steinke 2022, Def. 1."""
    if shape == LOGARITHMIC:
        return (1 / gamma - 1) / -math.log(gamma)
    return shape * (1 - gamma) / (gamma * -math.expm1(shape * math.log(gamma)))


def _stopping_probability(mean_runs: float, shape: float) -> float:
    """The gamma with this mean, at most 1 - 1e-9. The mean falls as gamma grows."""
    low, high = math.log(1e-12), math.log(1 - 1e-9)

    def excess(log_gamma: float) -> float:
        return math.log(_mean_runs(math.exp(log_gamma), shape) / mean_runs)

    if excess(high) > 0:
        return 1 - 1e-9
    return math.exp(roots.root(excess, low, high, within=1e-14))


def _check(mean_runs: float, shape: float) -> None:
    if not 1 <= mean_runs < math.inf:
        raise InputError(f"mean_runs={mean_runs}: at least one run in expectation, and finite.")
    if not shape >= 0:
        raise InputError(
            f"shape={shape}: 0 (logarithmic), 1 (geometric), up to infinity (Poisson)."
        )
