"""One step's privacy loss on a grid, by connect-the-dots, never below the truth.

Outputs between two edges x_a < x_b have losses between l(x_a) and l(x_b). They are replaced by two
atoms at those losses, which keep the mass of P and of Q. This spreads the likelihood ratio, so the
pair becomes easier to tell apart: its hockey-stick divergence grows at every epsilon, alone and in
any composition (Doroshenko et al. 2022, Thm. 3.1; Zhu, Dong and Wang 2022, Thm. 10). The edges are
multiples of a spacing h. They are close together only where the mass is, which makes the search
fast.

Rounding is covered. An edge's loss is wrong by at most `slack`, so bins are widened by `slack` and
every atom is moved up by it. Masses have an error bound, which is added on the bad side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from userdp.accounting import roots
from userdp.accounting.pair import Direction, Outputs, Quadrature
from userdp.accounting.special import Floats

Indices = NDArray[np.int64]

_MOST_BINS = 50_000

# Losses below this part of epsilon are resolved as if they were this part of epsilon.
_SMALL_LOSS = 1 / 50

# Exponents above this would overflow. Such bins are sent to their worse end instead.
_LARGEST_EXPONENT = 600.0


@dataclass(frozen=True, kw_only=True)
class Focus:
    """Where a grid should be accurate. It gives an upper bound whatever these numbers are.

    `tilt` is the saddle point of all steps at `epsilon`. `allowed` is how much the epsilon of all
    steps may grow by merging bins of width `spacing`. `resolution` is the widest bin relative to
    its loss, in case a single step decides. Losses above `cap` are split between `cap` and
    infinity.
    """

    epsilon: float
    tilt: float
    spacing: float
    allowed: float
    resolution: float
    cap: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Atoms:
    """Losses `spacing * index + slack` with their masses; `infinite` is the mass at infinity."""

    spacing: float
    index: Indices
    mass: Floats
    infinite: float
    slack: float


def tilted(loss: Floats, log_q: Floats, direction: Direction, tilt: float) -> tuple[Floats, Floats]:
    """The losses of `direction`, and log masses tilted by exp(tilt * loss), not normalised."""
    if direction is Direction.REMOVE:
        return loss, log_q + (1 + tilt) * loss
    return -loss, log_q - tilt * loss


def excess_of_spacing(
    loss: Floats, log_q: Floats, direction: Direction, tilt: float, spacing: float
) -> float:
    """How much a grid of this spacing adds to the log moment of one step, divided by the tilt.

    Times the number of steps, this is what the grid adds to epsilon. With r = e^loss, the chord of
    r^(1 + tilt) over a bin from a to b lies above the curve by
    tilt (1 + tilt) (loss - a)(b - loss) / 2.
    """
    loss, log_mass = tilted(loss, log_q, direction, tilt)
    mass = np.exp(log_mass - log_mass.max())
    part = loss / spacing
    part = part - np.floor(part)
    return float((1 + tilt) / 2 * spacing**2 * (mass @ (part * (1 - part))) / mass.sum())


def _edges(quadrature: Quadrature, direction: Direction, count: int, focus: Focus) -> Indices:
    """The edges of the bins, as multiples of the spacing: dense where the tilted mass is."""
    tilt, spacing = focus.tilt, focus.spacing
    _, log_mass = tilted(quadrature.loss, quadrature.log_q, direction, tilt)
    mass = np.exp(log_mass - log_mass.max())
    mass = (mass[1:] + mass[:-1]) / 2
    mass /= mass.sum()
    loss = quadrature.loss
    steps = np.maximum(np.diff(loss), 1e-300)
    # A bin of width v and density d adds d v^3. So for a given number of bins, widths in proportion
    # to d^(-1/3) are best. `scale` is the log of the constant; at `low` every bin has width 1.
    shape = (np.log(steps) - np.log(np.maximum(mass, 1e-300))) / 3 - math.log(spacing)
    # Bins much wider than 1 / (1 + tilt) cost exponentially more, not as v^2. And where one large
    # loss among many steps decides, the tilted mass does not show it.
    size = np.abs(loss[1:])
    finest = focus.resolution * np.maximum(size, _SMALL_LOSS * focus.epsilon)
    finest = np.where(size > 2 * focus.epsilon, np.inf, finest)
    widest = np.log(np.maximum(np.minimum(finest, 1 / (1 + tilt)) / spacing, 1.0))
    budget = focus.allowed / count * 12 / ((1 + tilt) * spacing**2)
    low, high = -float(shape.max()), -float(shape.min()) + float(widest.max())

    def widths_at(scale: float) -> Floats:
        return np.exp(np.minimum(np.maximum(shape + scale, 0.0), widest))

    def excess(scale: float) -> float:
        return math.log1p(float(mass @ (widths_at(scale) ** 2 - 1))) - math.log1p(budget)

    widths = spacing * widths_at(roots.root(excess, high, low, within=1e-9))
    bins = np.concatenate([[0.0], np.cumsum(steps / widths)])
    bins *= min(1.0, _MOST_BINS / bins[-1])
    wanted: Floats = np.arange(math.floor(bins[-1]) + 1, dtype=np.float64)
    at: Floats = np.interp(wanted, bins, loss)
    index = np.rint(at / spacing).astype(np.int64)
    first, last = math.ceil(loss[0] / spacing), math.floor(loss[-1] / spacing)
    ends = [first, max(first, last), *((0,) if first <= 0 <= last else ())]
    return np.unique(np.clip(np.concatenate([index, ends]), first, max(first, last)))


def discretise(
    pair: Outputs, quadrature: Quadrature, direction: Direction, *, count: int, focus: Focus
) -> Atoms:
    """The loss of one of `count` steps in `direction`, on a grid; it dominates the pair's loss.

    Losses above the last edge are split between that edge and infinity. This is connect-the-dots
    with the other end at infinity. It costs nothing where the sum of all steps exceeds epsilon
    anyway, because (1 - e^(epsilon - loss)) is linear in e^-loss there. So the grid need not reach
    further than epsilon and what the other steps may take away from it.
    """
    spacing = focus.spacing
    shown = quadrature.capped(direction, focus.cap)
    edges = _edges(shown, direction, count, focus)
    x, slack = pair.outputs_at(quadrature, spacing * edges.astype(np.float64))
    edges, x = _with_bounds(pair, direction, edges, x, focus)
    worst = x[-1] if direction is Direction.REMOVE else x[0]
    # If neither a cap nor a bound ends the losses, the quadrature does, up to a negligible tail.
    has_tail = shown is quadrature and math.isfinite(worst)
    if has_tail:
        edges, x = _up_to_tail(pair, quadrature, direction, edges, x, spacing)
    p, p_error = pair.mass_of_p(x)
    p_up = p + p_error
    lower, upper = spacing * edges[:-1], spacing * edges[1:]
    spread = -np.expm1(-(upper - lower + 2 * slack))
    if direction is Direction.REMOVE:
        # P-mass b at the upper end: b + rest = p, b e^-upper + rest e^-lower = q.
        log_q, log_q_error = pair.log_mass_of_q(x)
        scale = spacing * edges - slack
        with np.errstate(over="ignore", under="ignore"):
            kept, error = np.exp(scale + log_q), np.exp(scale + log_q_error)
        # Where a number overflows, everything goes to the worse end.
        known = np.isfinite(kept) & np.isfinite(error)
        kept, error = np.where(known, kept, 0.0), np.where(known, error, 0.0)
        to_upper = (p_up[1:] - kept + error) / np.append(spread, 1.0)
        to_upper = np.where(known, np.clip(to_upper, 0.0, p_up[1:]), p_up[1:])
        if has_tail:
            to_upper[-1] = p_up[-1]
        index = [edges[1:], edges, edges[:1]]
        mass = [to_upper[:-1], p_up[1:] - to_upper, p_up[:1]]
        infinite = float(to_upper[-1])
    else:
        # P and Q are exchanged here. The loss is -l, so the lower edge is the worse end.
        q, q_error = pair.mass_of_q(x)
        q_up = q + q_error
        scale = -spacing * edges - slack
        safe = scale < _LARGEST_EXPONENT
        factor = np.exp(np.where(safe, scale, 0.0))
        kept = np.where(safe, factor * np.maximum(p - p_error, 0.0)[:-1], 0.0)
        to_worse = np.clip((q_up[:-1] - kept) / np.append(1.0, spread), 0.0, q_up[:-1])
        if has_tail:
            to_worse[0] = q_up[0]
        index = [-edges[:-1], -edges, -edges[-1:]]
        mass = [to_worse[1:], q_up[:-1] - to_worse, q_up[-1:]]
        infinite = float(to_worse[0])
    return sorted_atoms(
        spacing=spacing,
        index=np.concatenate(index),
        mass=np.concatenate(mass),
        infinite=infinite + pair.lost,
        slack=slack,
    )


def _with_bounds(
    pair: Outputs, direction: Direction, edges: Indices, x: Floats, focus: Focus
) -> tuple[Indices, Floats]:
    """One more edge on each side where losses are bounded: no output lies beyond it."""
    if pair.least_loss > (-focus.cap if direction is Direction.ADD else -math.inf):
        begin = min(math.floor(pair.least_loss / focus.spacing), int(edges[0]) - 1)
        edges, x = np.append(begin, edges), np.append(-math.inf, x)
    if pair.largest_loss < (focus.cap if direction is Direction.REMOVE else math.inf):
        end = max(math.ceil(pair.largest_loss / focus.spacing), int(edges[-1]) + 1)
        edges, x = np.append(edges, end), np.append(x, math.inf)
    return edges.astype(np.int64), x


def _up_to_tail(
    pair: Outputs,
    quadrature: Quadrature,
    direction: Direction,
    edges: Indices,
    x: Floats,
    spacing: float,
) -> tuple[Indices, Floats]:
    """One more edge at the quadrature's worst output, its loss rounded up to the grid.

    Without it, a step whose losses are all smaller than the spacing would have no edge above 0.
    Then everything above 0 would be split to infinity. The outputs beyond the new edge may have
    smaller losses than the edge says, so they must not be split: all of them count as infinite.
    """
    if direction is Direction.REMOVE:
        end = max(quadrature.x[-1], x[-1])
        loss, error = pair.loss_at(np.array([end]))
        above = math.ceil((float(loss[0]) + error) / spacing)
        return np.append(edges, max(above, int(edges[-1]))), np.append(x, end)
    end = min(quadrature.x[0], x[0])
    loss, error = pair.loss_at(np.array([end]))
    below = math.floor((float(loss[0]) - error) / spacing)
    return np.append(min(below, int(edges[0])), edges), np.append(end, x)


def sorted_atoms(
    *, spacing: float, index: Indices, mass: Floats, infinite: float, slack: float
) -> Atoms:
    """Atoms in the order of their losses."""
    order = np.argsort(index, kind="stable")
    return Atoms(
        spacing=spacing, index=index[order], mass=mass[order], infinite=infinite, slack=slack
    )


def revealed(branches: Sequence[tuple[float, Atoms]]) -> Atoms:
    """The loss of a step that first reveals which of several pairs it is, each with its chance."""
    first = branches[0][1]
    return sorted_atoms(
        spacing=first.spacing,
        index=np.concatenate([atoms.index for _, atoms in branches]),
        mass=np.concatenate([chance * atoms.mass for chance, atoms in branches]),
        infinite=sum(chance * atoms.infinite for chance, atoms in branches),
        slack=max(atoms.slack for _, atoms in branches),
    )
