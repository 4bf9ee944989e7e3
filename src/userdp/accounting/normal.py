"""Masses of mixtures of Gaussians between given points, with a bound on their rounding.

Every number that the accountant adds up is such a mass, so its error is stated once, here. Far out
a mass underflows while its ratio to another one still matters. So there is a second form, in
logarithms.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from userdp.accounting.special import Floats, log_ndtr, ndtr

UNIT_ROUNDOFF = 2.0**-53

# scipy's normal distribution function and numpy's exp and log have at most this relative error.
SPECIAL = 16 * UNIT_ROUNDOFF

# No array of points by components has more entries than this.
BLOCK = 1 << 21


def between(tail: Floats, below: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """The masses below, between and above increasing points, and how large the terms of each are.

    `tail` is the mass beyond a point on its own side of the centre, `below` says which side.
    """
    inside: Floats = np.where(
        below[1:] == below[:-1], np.abs(tail[1:] - tail[:-1]), 1 - tail[1:] - tail[:-1]
    )
    first: Floats = np.where(below[:1], tail[:1], 1 - tail[:1])
    last: Floats = np.where(below[-1:], 1 - tail[-1:], tail[-1:])
    mass = np.maximum(np.concatenate([first, inside, last]), 0.0)
    return mass, np.concatenate([first, tail[1:] + tail[:-1], last])


def masses(z: Floats) -> tuple[Floats, Floats]:
    """The mass of N(0, 1) below, between and above increasing `z` along axis 0, and its error."""
    mass, size = between(ndtr(-np.abs(z)), z <= 0)
    return mass, SPECIAL * size + UNIT_ROUNDOFF * mass


def mixture_masses(
    x: Floats, shifts: Floats, weights: Floats, noise: float
) -> tuple[Floats, Floats]:
    """The mixture's mass below, between and above increasing `x`, and its error."""
    mass, error = np.zeros(len(x) + 1), np.zeros(len(x) + 1)
    columns = max(1, BLOCK // len(x))
    for first in range(0, len(shifts), columns):
        block = slice(first, first + columns)
        part, part_error = masses(np.subtract.outer(x, shifts[block]) / noise)
        mass += part @ weights[block]
        error += part_error @ weights[block]
    return mass, error + SPECIAL * len(shifts) * mass


def log_masses(z: Floats) -> tuple[Floats, Floats]:
    """The log of N(0, 1)'s mass between and above increasing `z` along axis 0, and of its error."""
    z = np.concatenate([z, np.full((1, *z.shape[1:]), np.inf)])
    up, down = log_ndtr(-z), log_ndtr(z)
    right = z[1:] > 0
    near, far = np.where(right, up[:-1], down[1:]), np.where(right, up[1:], down[:-1])
    # Between two points that rounding made equal there is no mass, so log(0) is right.
    with np.errstate(divide="ignore", invalid="ignore"):
        log_mass = near + np.log(-np.expm1(np.minimum(far - near, 0.0)))
        # A far end at infinity has no error of its own.
        size = 4 + np.abs(near) + np.where(np.isfinite(far), np.abs(far), 0.0)
        log_error = near + np.log(SPECIAL * size)
    empty = np.isneginf(near)
    return np.where(empty, -np.inf, log_mass), np.where(empty, -np.inf, log_error)


def log_mixture_masses(
    x: Floats, shifts: Floats, weights: Floats, noise: float
) -> tuple[Floats, Floats]:
    """The log of the mixture's mass between and above increasing `x`, and of its error."""
    mass, error = np.full(len(x), -np.inf), np.full(len(x), -np.inf)
    for shift, weight in zip(shifts, np.log(weights), strict=True):
        part, part_error = log_masses((x - shift) / noise)
        mass = np.logaddexp(mass, part + weight)
        error = np.logaddexp(error, part_error + weight)
    # Between two points that rounding made equal there is no mass, and its log has no size.
    size = np.where(np.isneginf(mass), 0.0, np.abs(mass))
    return mass, np.logaddexp(error, mass + np.log(SPECIAL * (4 + len(shifts) + size)))
