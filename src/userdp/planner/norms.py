"""L(G), the norm of the mean gradient over G records of one user, as the planner assumes it.

Reference: Charles et al. 2024, Eq. 8 and App. B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from userdp.errors import InputError

Norms = Callable[[int], float]


def same_direction(norm: float = 1.0) -> Norms:
    """L(G) = L(1): all of a user's gradients are equal. The worst case for ULS (App. B)."""
    return lambda group_size: norm


def orthogonal(norm: float = 1.0) -> Norms:
    """L(G) = L(1) / sqrt(G): a user's gradients are orthogonal. The best case for ULS (App. B)."""
    return lambda group_size: norm / math.sqrt(group_size)


def estimated(norms: Mapping[int, float]) -> Norms:
    """L(G) from median norms at some group sizes: interpolated in logs, constant outside them.

    >>> round(estimated({1: 4.0, 4: 2.0})(2), 6)
    2.828427
    """
    if not norms or any(size < 1 or not value > 0 for size, value in norms.items()):
        raise InputError(
            "gradient norms map group sizes (1 or more) to positive norms; give at least size 1."
        )
    if 1 not in norms:
        raise InputError(
            "gradient norms lack group size 1, the norm of a single record's gradient."
        )
    sizes = sorted(norms)
    at, values = np.log(sizes), np.log([norms[size] for size in sizes])
    return lambda group_size: float(np.exp(np.interp(math.log(group_size), at, values)))
