"""One step's privacy loss on a grid, by connect-the-dots, never below the truth.

Outputs between two edges x_a < x_b have losses between l(x_a) and l(x_b). Replacing them by two
atoms at those losses that keep the mass of P and of Q spreads the likelihood ratio, so the pair
becomes easier to tell apart: its hockey-stick divergence grows at every epsilon, alone and in any
composition (Doroshenko et al. 2022, Thm. 3.1; Zhu, Dong and Wang 2022, Thm. 10). The edges are
multiples of a spacing h, close together only where the mass is: that is what makes the search fast.

Rounding is covered, not ignored: an edge's loss is off by at most `slack`, so bins are widened by
it and every atom is moved up by it; masses carry an error bound, which is added on the bad side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from userdp.accounting.pair import UNIT_ROUNDOFF, Floats, Pair, Quadrature, log_upper_tail
from userdp.accounting.special import ndtr

Indices = NDArray[np.int64]

# scipy's normal distribution function and numpy's exp and log are within this many roundoffs.
_SPECIAL = 16 * UNIT_ROUNDOFF

_MOST_BINS = 50_000

# Losses far smaller than epsilon need no better relative resolution than this part of epsilon has.
_SMALL_LOSS = 1 / 50

# exp of more than this is left alone: such bins are sent to their worse end instead.
_LARGEST_EXPONENT = 600.0


class Direction(StrEnum):
    """Which of the two neighbours holds the user: both directions are priced."""

    REMOVE = "remove"
    ADD = "add"


@dataclass(frozen=True, kw_only=True)
class Focus:
    """Where a discretisation shall be accurate: it is an upper bound whatever these are.

    `tilt` is the saddle point of all steps at `epsilon`; `allowed` is how much the epsilon of all
    steps may grow by merging bins of width `spacing`; `resolution` is the widest bin relative to
    its loss, for steps of which a single one may decide.
    """

    epsilon: float
    tilt: float
    spacing: float
    allowed: float
    resolution: float


@dataclass(frozen=True, kw_only=True)
class Atoms:
    """Losses `spacing * index + slack` with masses; `infinite` has an infinite loss."""

    spacing: float
    index: Indices
    mass: Floats
    infinite: float
    slack: float


def tilted(quadrature: Quadrature, direction: Direction, tilt: float) -> tuple[Floats, Floats]:
    """Losses of `direction` and log masses, tilted by exp(tilt * loss); not normalised."""
    if direction is Direction.REMOVE:
        return quadrature.loss, quadrature.log_q + (1 + tilt) * quadrature.loss
    return -quadrature.loss, quadrature.log_q - tilt * quadrature.loss


def excess_of_spacing(
    quadrature: Quadrature, direction: Direction, tilt: float, spacing: float
) -> float:
    """How much a grid of this spacing adds to the log moment at `tilt`, per step, over the tilt.

    Times the number of steps this is the excess of epsilon: the chord of r^(1 + tilt) over a bin,
    r = e^loss, lies above the curve by tilt (1 + tilt) (loss - a)(b - loss) / 2.
    """
    loss, log_mass = tilted(quadrature, direction, tilt)
    mass = np.exp(log_mass - log_mass.max())
    part = loss / spacing
    part = part - np.floor(part)
    return float((1 + tilt) / 2 * spacing**2 * (mass @ (part * (1 - part))) / mass.sum())


def _edges(quadrature: Quadrature, direction: Direction, count: int, focus: Focus) -> Indices:
    """Multiples of the spacing that bound the bins: dense where the tilted mass is."""
    tilt, spacing = focus.tilt, focus.spacing
    loss, log_mass = tilted(quadrature, direction, tilt)
    mass = np.exp(log_mass - log_mass.max())
    mass = (mass[1:] + mass[:-1]) / 2
    mass /= mass.sum()
    loss = quadrature.loss
    steps = np.maximum(np.diff(loss), 1e-300)
    # A bin of width v holding density d adds d v^3: for a number of bins, v = d^(-1/3) is best. The
    # constant is bisected, from "every bin has width 1" up.
    shape = np.log(steps / np.maximum(mass, 1e-300)) / 3 - math.log(spacing)
    # Much wider than 1 / (1 + tilt) the cost of a bin grows exponentially, not as v^2. And where
    # one large loss among many steps decides, the tilted mass does not show it.
    size = np.abs(loss[1:])
    finest = focus.resolution * np.maximum(size, _SMALL_LOSS * focus.epsilon)
    finest = np.where(size > 2 * focus.epsilon, np.inf, finest)
    widest = np.log(np.maximum(np.minimum(finest, 1 / (1 + tilt)) / spacing, 1.0))
    budget = focus.allowed / count * 12 / ((1 + tilt) * spacing**2)
    low, high = -float(shape.max()), -float(shape.min()) + float(widest.max())
    for _ in range(50):
        scale = (low + high) / 2
        widths = np.exp(np.minimum(np.maximum(shape + scale, 0.0), widest))
        if float(mass @ (widths**2 - 1)) > budget:
            high = scale
        else:
            low = scale
    widths = spacing * np.exp(np.minimum(np.maximum(shape + low, 0.0), widest))
    bins = np.concatenate([[0.0], np.cumsum(steps / widths)])
    bins *= min(1.0, _MOST_BINS / bins[-1])
    wanted: Floats = np.arange(math.floor(bins[-1]) + 1, dtype=np.float64)
    at: Floats = np.interp(wanted, bins, loss)
    index = np.rint(at / spacing).astype(np.int64)
    first, last = math.ceil(loss[0] / spacing), math.floor(loss[-1] / spacing)
    ends = [first, max(first, last), *((0,) if first <= 0 <= last else ())]
    return np.unique(np.clip(np.concatenate([index, ends]), first, max(first, last)))


def _outputs_at(pair: Pair, quadrature: Quadrature, losses: Floats) -> tuple[Floats, float]:
    """Increasing outputs whose losses are `losses` up to the second result."""
    if pair.shifts[0] == 0:
        with np.errstate(divide="ignore", invalid="ignore"):
            target = losses + np.log(-np.expm1(pair.least_loss - losses))
    else:
        target = losses
    # Next to the least loss the difference above rounds to nothing; the residual below says so.
    target = np.clip(target, quadrature.rise[0], quadrature.rise[-1])
    x = np.interp(target, quadrature.rise, quadrature.x)
    rounding = 0.0
    # The rise is convex and increasing: Newton's method converges from everywhere.
    for _ in range(8):
        value, slope, rounding = pair.rise(x)
        gap = value - target
        x = x - gap / slope
        if float(np.abs(gap).max()) <= 1e-7:
            break
    x = np.maximum.accumulate(x)
    value, _, rounding = pair.rise(x)
    error = float(np.abs(pair.loss_of_rise(value) - losses).max())
    return x, error + rounding + 8 * UNIT_ROUNDOFF * float(np.abs(losses).max())


def _masses(z: Floats) -> tuple[Floats, Floats]:
    """N(0, 1)'s mass below, between and above increasing `z`, along axis 0; its error."""
    tail = ndtr(-np.abs(z))
    below = z <= 0
    inside: Floats = np.where(
        below[1:] == below[:-1], np.abs(tail[1:] - tail[:-1]), 1 - tail[1:] - tail[:-1]
    )
    first: Floats = np.where(below[:1], tail[:1], 1 - tail[:1])
    last: Floats = np.where(below[-1:], 1 - tail[-1:], tail[-1:])
    mass = np.concatenate([first, inside, last])
    error = _SPECIAL * np.concatenate([first, tail[1:] + tail[:-1], last])
    return np.maximum(mass, 0.0), error + UNIT_ROUNDOFF * mass


def _mass_of_p(pair: Pair, x: Floats) -> tuple[Floats, Floats]:
    """P's mass below, between and above `x`, and its error."""
    mass, error = np.zeros(len(x) + 1), np.zeros(len(x) + 1)
    columns = max(1, (1 << 21) // len(x))
    for first in range(0, len(pair.shifts), columns):
        shifts = pair.shifts[first : first + columns]
        weights = pair.weights[first : first + columns]
        part, part_error = _masses(np.subtract.outer(x, shifts) / pair.noise)
        mass += part @ weights
        error += part_error @ weights
    return mass, error + _SPECIAL * len(pair.shifts) * mass


def _log_mass_of_q(pair: Pair, x: Floats) -> tuple[Floats, Floats]:
    """log of Q's mass between the points `x`, and of its error: accurate where it underflows."""
    z = x / pair.noise
    up, down = log_upper_tail(z), log_upper_tail(-z)
    near, far = np.where(z[1:] > 0, up[:-1], down[1:]), np.where(z[1:] > 0, up[1:], down[:-1])
    # log(e^near - e^far), and -inf for two points that rounding made one.
    with np.errstate(divide="ignore"):
        log_mass = near + np.log(-np.expm1(np.minimum(far - near, 0.0)))
    return log_mass, near + np.log(_SPECIAL * (4 + np.abs(near) + np.abs(far)))


def discretise(
    pair: Pair, quadrature: Quadrature, direction: Direction, *, count: int, focus: Focus
) -> Atoms:
    """The loss of one of `count` steps in `direction`, on a grid: dominates the pair's own."""
    spacing = focus.spacing
    edges = _edges(quadrature, direction, count, focus)
    x, slack = _outputs_at(pair, quadrature, spacing * edges.astype(np.float64))
    # One more edge where the outputs begin, on the grid point below its loss: the first bin is a
    # little narrower than its atoms are apart. What lies before it is hardly anything.
    start = float(quadrature.x[0])
    if start < x[0]:
        begin = math.floor((float(quadrature.loss[0]) - slack) / spacing)
        edges = np.concatenate([[min(begin, int(edges[0]) - 1)], edges])
        x = np.concatenate([[start], x])
    p, p_error = _mass_of_p(pair, x)
    q, q_error = _masses(x / pair.noise)
    log_q, log_q_error = _log_mass_of_q(pair, x)
    lower, upper = spacing * edges[:-1], spacing * edges[1:]
    spread = -np.expm1(-(upper - lower + 2 * slack))
    p_up, q_up = p + p_error, q + q_error
    if direction is Direction.REMOVE:
        # P-mass b at the upper end: b + rest = p, b e^-upper + rest e^-lower = q.
        scale = lower - slack
        with np.errstate(over="ignore", under="ignore"):
            kept, error = np.exp(scale + log_q), np.exp(scale + log_q_error)
        to_upper = np.clip((p_up[1:-1] - kept + error) / spread, 0.0, p_up[1:-1])
        index = [edges[1:], edges[:-1], edges[1:2]]
        mass = [to_upper, p_up[1:-1] - to_upper, p_up[:1]]
        infinite = float(p_up[-1]) + pair.lost
    else:
        # The same with P and Q exchanged: the loss is -l, so the lower edge is the worse end.
        scale = -upper - slack
        safe = scale < _LARGEST_EXPONENT
        factor = np.exp(np.where(safe, scale, 0.0))
        kept = np.where(safe, factor * np.maximum(p[1:-1] - p_error[1:-1], 0.0), 0.0)
        to_worse = np.clip((q_up[1:-1] - kept) / spread, 0.0, q_up[1:-1])
        index = [-edges[:-1], -edges[1:], -edges[-1:]]
        mass = [to_worse, q_up[1:-1] - to_worse, q_up[-1:]]
        infinite = float(q_up[0])
    all_index, all_mass = np.concatenate(index), np.concatenate(mass)
    order = np.argsort(all_index, kind="stable")
    return Atoms(
        spacing=spacing,
        index=all_index[order].astype(np.int64),
        mass=all_mass[order],
        infinite=infinite,
        slack=slack,
    )
