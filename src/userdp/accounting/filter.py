"""The filter of Asi & Liu: half the budget watches for concentration, half pays for training.

Before each step, AboveThreshold checks that the users' gradients lie close together. Only then
outliers are removed and less noise is added. The first failed check ends the run. Training gets
(epsilon/2, delta/2). The threshold test gets epsilon/2 for the whole run, and the removal of
outliers gets delta/2.

These are the paper's numbers, for comparison. What is trained here has constants of its own, which
are proven (`updates/halting.py`, docs/accounting.md).
Reference: Chua et al. 2024 (Mind the privacy unit), App. A, Alg. 3; Asi and Liu 2024, Alg. 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from userdp.accounting import accountant, events
from userdp.errors import InputError
from userdp.units import Adjacency


@dataclass(frozen=True, kw_only=True)
class FilterPlan:
    """How a run with the filter spends (epsilon, delta).

    sigma = `noise_multiplier`, tau = `concentration`. `noise_stddev` is the standard deviation on
    each coordinate of the mean gradient, nu in Alg. 3, line 14.
    """

    epsilon: float
    delta: float
    noise_multiplier: float
    threshold_epsilon: float
    noise_stddev: float


def filter_plan(
    *, epsilon: float, delta: float, steps: int, num_users: int, concentration: float
) -> FilterPlan:
    """The filter's parts for a target (epsilon, delta): Alg. 3, lines 2, 9 and 14.

    Every user takes part in every step (q = 1), so training is a Gaussian mechanism.

    >>> plan = filter_plan(epsilon=3.0, delta=1e-5, steps=100, num_users=1000, concentration=0.1)
    >>> plan.threshold_epsilon, round(plan.noise_multiplier, 2)
    (1.5, 26.82)
    """
    accountant.check_epsilon(epsilon)
    accountant.check_delta(delta)
    if not concentration > 0:
        raise InputError(f"concentration={concentration}: tau must be above 0.")
    noise_multiplier = accountant.calibrate(
        lambda sigma: events.repeated(
            events.poisson_users_gaussian(user_sampling_prob=1.0, noise_multiplier=sigma), steps
        ),
        target=epsilon / 2,
        delta=delta / 2,
        adjacency=Adjacency.ADD_REMOVE,
    )
    # log(e^epsilon T / delta), without overflow.
    logarithm = epsilon + math.log(steps / delta)
    return FilterPlan(
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=noise_multiplier,
        threshold_epsilon=epsilon / 2,
        noise_stddev=noise_multiplier * concentration * math.sqrt(8 * logarithm) / num_users,
    )
