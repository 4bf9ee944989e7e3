"""Steps of much noise: a Gaussian at a known distance dominates them, in closed form.

A user moves the sum by K noise deviations, where K >= 0 is drawn by coins. If K varies little, a
step is almost N(0, 1) against N(E K, 1). This file proves how much further away the Gaussian must
be to dominate. No grid is needed, so no number of steps and no number of mixed Gaussians is too
large.

Claim. Let P = E N(K, 1), Q = N(0, 1), D = K - E K and R >= E K - min K. Let

    A = E[(e^(R D) - 1) / R] + E[|D|^3 e^(R |D|); D < 0] / 6,     d e^(-R d - d^2 / 2) >= A,

m = E K + d and t = E Phi(D - R). Then (P, Q) is dominated by P' = (1 - t) N(m, 1) and an atom of
mass t, against Q' = N(0, 1), which never gives the atom.

Proof. P/Q increases with the output, so the best tests are thresholds, E K + u. Such a test accepts
with E Phi(D - u) under P. We show that this is at most t + (1 - t) Phi(d - u), which the same test,
or the atom, has under P'.
  * u > R: E Phi(D - u) <= t.
  * u < -R: every K is above the threshold, where Phi is concave: E Phi(D - u) <= Phi(-u).
  * |u| <= R: Phi(D - u) - Phi(-u) = phi(u) int_0^D e^(us - s^2/2) ds. Here e^(-s^2/2) is at most 1
    for D > 0, and at least 1 - s^2/2 for D < 0. So the mean is at most phi(u) A: int_0^D e^(us) ds
    increases with u for D of either sign, and is largest at u = R. And Phi(d - u) - Phi(-u) is at
    least phi(u) d e^(-R d - d^2/2).
A user who replaces another one (`exchange`) has -K on the other side. By symmetry that test accepts
with at least (1 - t) Phi(-2 E K - d - u) there, so N(m, 1) against N(-m, 1), each beside an atom of
its own of mass t, dominates.

T steps are then a Gaussian at the root of the summed squares, beside atoms of at most the summed t:
delta <= delta of the Gaussian + sum t. Where only one neighbour has atoms, the other direction has
(1 - t)^T P, hence epsilon smaller by -sum log(1 - t) there. Everything here is public.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from userdp.accounting import gaussian
from userdp.accounting.special import ndtr, normal_quantile
from userdp.accounting.steps import Exchanged, Mixture, Step

# The atoms may take this share of delta.
_ATOM_SHARE = 1e-7
# Weights, means and special functions are trusted to this relative error; theirs is far smaller.
_ERROR = 1e-9
# Where R A is above this, the step is not mild enough for the closed form.
_LARGEST_EXCESS = 0.1
# If the Gaussian is at most this much (relative) too far away, a grid is not worth its time.
TIGHT = 2e-5


@dataclass(frozen=True, kw_only=True)
class Gaussian:
    """N(0, 1) against N(`distance`, 1), with atoms; the exact distance is at least `mean`."""

    distance: float
    mean: float
    atoms: float

    @property
    def is_tight(self) -> bool:
        """Whether a grid could hardly do better."""
        return self.distance <= (1 + TIGHT) * self.mean

    def epsilon(self, delta: float) -> float:
        """An upper bound on epsilon at `delta`."""
        return gaussian.epsilon(self.distance, delta - self.atoms) + 2 * self.atoms


def dominating(mechanism: Sequence[Step], delta: float) -> Gaussian | None:
    """A Gaussian that dominates the whole mechanism; None if a step is not mild.

    >>> step = Mixture(
    ...     noise=1e5, shifts=np.array([0.0, 1.0]), weights=np.array([0.9, 0.1]), count=10**6)
    >>> found = dominating([step], 1e-6)
    >>> found is not None and round(found.distance, 6)
    0.001
    """
    steps = sum(step.count for step in mechanism)
    reach = 1 - normal_quantile(max(_ATOM_SHARE * delta / steps, 1e-290))
    square = mean_square = atoms = 0.0
    for step in mechanism:
        match step:
            case Mixture() if step.is_gaussian:
                distance, mean, atom = (float(step.shifts[0]) / step.noise,) * 2 + (0.0,)
            case Mixture() | Exchanged():
                found = _one(step, reach)
                if found is None:
                    return None
                distance, mean, atom = found
                if isinstance(step, Exchanged):
                    distance, mean = 2 * distance, 2 * mean
            case _:
                return None
        square += step.count * distance**2
        mean_square += step.count * mean**2
        atoms += step.count * atom
    if not 0 < square < math.inf or atoms > 10 * _ATOM_SHARE * delta:
        return None
    return Gaussian(
        distance=math.sqrt(square) * (1 + _ERROR), mean=math.sqrt(mean_square), atoms=atoms
    )


def _one(step: Mixture | Exchanged, reach: float) -> tuple[float, float, float] | None:
    """m, E K and t of one step, with R = `reach`."""
    weights = step.weights / math.fsum(step.weights)
    moves = step.shifts / step.noise
    mean = float(weights @ moves)
    far = moves - mean
    if mean - float(moves.min()) > reach / 2:
        return None
    with np.errstate(over="ignore"):
        # The mean of D is 0. Subtracting R D leaves terms of one sign, which cannot cancel.
        curve = (np.expm1(reach * far) - reach * far) / reach
        below = np.maximum(-far, 0.0)
        area = float(weights @ curve) + float(weights @ (below**3 * np.exp(reach * below))) / 6
    area = area * (1 + _ERROR) + _ERROR * float(weights @ np.abs(far))
    if not reach * area <= _LARGEST_EXCESS or area > _LARGEST_EXCESS:
        return None
    # d = A (1 + x) with x = 2 (R A + A^2) <= 0.22: then log(1 + x) >= R d + d^2 / 2.
    gap = area * (1 + 2 * (reach * area + area**2))
    atom = float(weights @ ndtr(far - reach)) * (1 + _ERROR)
    return mean * (1 + _ERROR) + gap, mean, atom


def least_noise(
    mechanism_of: Callable[[float], Sequence[Step]], *, epsilon: float, delta: float
) -> float | None:
    """The least noise multiplier for a target, at most 1e-5 too large; None if a step is not mild.

    The search assumes that every step's noise is in proportion to the multiplier. The result is
    checked without that assumption.
    """
    wanted = gaussian.sensitivity(epsilon, delta)
    noise = 0.0
    for step in mechanism_of(1.0):
        if not isinstance(step, Mixture | Exchanged):
            return None
        mean = float(step.weights @ step.shifts) / float(step.weights.sum()) / step.noise
        noise += step.count * ((2 if isinstance(step, Exchanged) else 1) * mean) ** 2
    noise = math.sqrt(noise) / wanted
    for _ in range(6):
        found = dominating(mechanism_of(noise), delta)
        if found is None or not found.is_tight:
            return None
        if found.distance <= wanted * (1 - 1e-7):
            return noise if found.epsilon(delta) <= epsilon else None
        noise *= found.distance / wanted * (1 + 2e-6)
    return None
