"""Black-box group privacy: the baseline that exact accounting replaces.

If a mechanism is (e, d)-DP for one record, it is (G e, d (e^(G e) - 1) / (e^e - 1))-DP for G
records (Vadhan 2017, Lemma 2.2). This rule knows nothing of the mechanism. So it grows
exponentially in G, where the mixture of Gaussians grows about linearly (Charles et al. 2024, Fig.
1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from userdp.accounting import certificate, roots, search, steps
from userdp.accounting.certificate import Evaluation
from userdp.accounting.events import DpEvent
from userdp.errors import InputError
from userdp.units import Adjacency

# Larger record-level epsilons are not tried: the paper calls these runs "diverged".
_LARGEST_EPSILON = 2000.0
# Smaller deltas are not tried: after composition no double can tell them from 0.
_SMALLEST_LOG_DELTA = -640.0


def group_epsilon(record_level: Sequence[steps.Step], *, group_size: int, delta: float) -> float:
    """User-level epsilon for users of at most `group_size` records; infinite if none is found.

    `record_level` prices the run for a single record. G = `group_size`.

    >>> import numpy as np
    >>> step = steps.Mixture(
    ...     noise=2.0, shifts=np.array([0.0, 1.0]), weights=np.array([0.99, 0.01]), count=2000)
    >>> round(group_epsilon([step], group_size=4, delta=1e-6), 1)
    5.0
    """

    @cache
    def excess(epsilon: float) -> float:
        factor = group_size * epsilon + math.log(-math.expm1(-group_size * epsilon))
        factor -= epsilon + math.log(-math.expm1(-epsilon))
        target = math.log(delta) - factor
        if target < _SMALLEST_LOG_DELTA:
            return math.inf
        reached = search.delta_bound(record_level, epsilon, hint=math.exp(target))
        return math.log(max(reached, 1e-300)) - target

    # The excess may rise before it falls, so the first crossing is searched for from below.
    low = max(search.epsilon_bound(record_level, delta), 1e-6)
    if group_size == 1 or excess(low) <= 0:
        return group_size * low
    high = low
    while excess(high) > 0:
        low, high = high, 1.15 * high
        if high > _LARGEST_EPSILON:
            return math.inf
    return group_size * roots.root(excess, low, high, relative=1e-5)


def evaluation(
    record_level: DpEvent, *, group_size: int, delta: float, adjacency: Adjacency
) -> Evaluation:
    """`group_epsilon` of an event that prices the run for one record, under this adjacency.

    Under replace, the records of a user are replaced one after the other.
    """
    mechanism = steps.of(record_level, adjacency)
    if mechanism is None:
        raise InputError("group privacy here prices Poisson-sampled records with Gaussian noise.")
    epsilon = group_epsilon(mechanism, group_size=group_size, delta=delta) if mechanism else 0.0
    if math.isinf(epsilon):
        raise InputError(
            f"black-box group privacy finds no finite epsilon for group_size={group_size} here: "
            "its bound grows exponentially. Use --accountant pld, which is exact."
        )
    return Evaluation(
        epsilon=epsilon,
        certified_by=f"{certificate.own()} for one record, then black-box group privacy "
        "(Vadhan 2017); an upper bound, far from tight",
        error_bound=math.inf,
    )
