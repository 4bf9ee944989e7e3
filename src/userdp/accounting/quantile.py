"""Looking at private numbers for a price: quantiles of users, and adaptive clipping.

Some choices read the users' data: the group size (the median number of records a user has), the
clip norm (a quantile of update norms), and estimates for planning. Here each of them reads a noisy
histogram, in which every user is one entry. Its price is a Gaussian event, which the ledger adds to
that of training.

Public: thresholds, the quantile asked for, the noise, the result. Secret: the values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from dp_accounting import dp_event
from numpy.typing import NDArray

from userdp.accounting.events import DpEvent
from userdp.errors import InputError


@dataclass(frozen=True, kw_only=True)
class PaidQuantile:
    """A quantile, as one of the thresholds, and what it cost."""

    value: float
    event: DpEvent


def private_quantile(
    values: NDArray[np.float64] | Sequence[float],
    *,
    thresholds: Sequence[float],
    quantile: float,
    noise_multiplier: float,
    rng: np.random.Generator,
) -> PaidQuantile:
    """The first threshold below which about a share `quantile` of the users lies.

    Each user has one value. It must depend on that user's data alone, and not on who else owns a
    record. Each value falls into one bin, so adding or removing a user moves the histogram by 1 in
    L2. With N(0, noise_multiplier^2) added to every count, this is a Gaussian event. The rest is
    post-processing. Replacing a user moves the histogram by sqrt(2), and the accountant's replace
    adjacency covers 2.

    Reference: the private median of Charles et al. 2024, Sec. 6, by the Gaussian mechanism.

    >>> paid = private_quantile(
    ...     [3.0] * 500 + [30.0] * 400, thresholds=[1, 2, 4, 8, 16, 32, 64], quantile=0.5,
    ...     noise_multiplier=5.0, rng=np.random.default_rng(0))
    >>> paid.value, paid.event
    (4.0, GaussianDpEvent(noise_multiplier=5.0))
    """
    edges = np.asarray(thresholds, dtype=np.float64)
    if len(edges) < 1 or np.any(np.diff(edges) <= 0):
        raise InputError(
            "thresholds must be one or more increasing numbers, chosen without the data."
        )
    if not 0 < quantile < 1:
        raise InputError(f"quantile={quantile} must lie strictly between 0 and 1.")
    if not noise_multiplier > 0:
        raise InputError(f"noise_multiplier={noise_multiplier} protects nobody: use more than 0.")
    bins = np.searchsorted(edges, np.asarray(values, dtype=np.float64), side="left")
    counts = np.bincount(bins, minlength=len(edges) + 1).astype(np.float64)
    noisy = np.maximum(counts + rng.normal(scale=noise_multiplier, size=len(counts)), 0.0)
    share = np.cumsum(noisy) / max(float(noisy.sum()), 1e-300)
    first = int(np.searchsorted(share, quantile, side="left"))
    return PaidQuantile(
        value=float(edges[min(first, len(edges) - 1)]),
        event=dp_event.GaussianDpEvent(noise_multiplier),
    )


def adaptive_clipping_noise(*, noise_multiplier: float, count_noise: float) -> float:
    """The noise multiplier on updates, when each step also releases a noisy count.

    The count is that of the users whose updates were not clipped. A step releases the clipped sum
    with multiplier z_D, and the count with standard deviation s. Both together are one Gaussian
    mechanism with multiplier z if z_D = (z^-2 - (2 s)^-2)^(-1/2), because the count, centred at
    1/2, moves by at most 1/2. So the step is priced as if clipping were fixed, and the price of
    adapting is the larger noise: z_D instead of z.

    z = `noise_multiplier`, s = `count_noise`. Reference: Andrew et al. 2021, Thm. 1.

    >>> round(adaptive_clipping_noise(noise_multiplier=1.0, count_noise=5.0), 4)
    1.005
    """
    if not count_noise > noise_multiplier / 2:
        raise InputError(
            f"count_noise={count_noise:g} leaves nothing for the updates: these steps take "
            f"noise_multiplier={noise_multiplier:.6g} in all, and the count needs more than half "
            "of that. Raise count_noise ([privacy] clip_count_noise; a twentieth of the cohort "
            "size is common), or choose a larger epsilon or a smaller noise_multiplier."
        )
    return 1 / math.sqrt(noise_multiplier**-2 - (2 * count_noise) ** -2)
