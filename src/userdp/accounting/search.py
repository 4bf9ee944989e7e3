"""Our own epsilon and delta: upper bounds by their own proof, in milliseconds.

A mechanism is a list of steps. Each step is repeated by its count, and all are composed adaptively.
delta at epsilon is the hockey-stick divergence of Charles et al. 2024, Eq. 1. `epsilon_bound` and
`delta_bound` never fall below the truth: `discretise` and `compose` say why. `tolerance` chooses
how far above the truth they may be. `least_noise` searches for the noise that meets a target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from userdp.accounting import compose, gaussian, mild, roots
from userdp.accounting.compose import Composed
from userdp.accounting.discretise import Focus, excess_of_spacing, tilted
from userdp.accounting.exchange import Exchange
from userdp.accounting.pair import Direction, MixturePair, Outputs
from userdp.accounting.prepared import Prepared, directions, joined, prepare
from userdp.accounting.special import Floats
from userdp.accounting.steps import Mixture, Step, chance_of_moving

# The grid may add this much (relative) to epsilon.
TOLERANCE = 4e-5
COARSE_TOLERANCE = 1e-3

# Smaller epsilons are not worth telling from 0. They are reported as this.
NOTHING = 1e-6

# No grid is made for a smaller epsilon.
_LEAST_FOCUS = 1e-12

# Indices of a grid are whole numbers that a double holds exactly.
_LARGEST_INDEX = 2.0**52

# exp(-tilt epsilon) is about delta, and delta is above exp(-600).
_LARGEST_EXPONENT = 600.0

# No larger epsilon is searched for.
_LARGEST_GUESS = 1e6

# `dp_accounting` has closed forms for two Gaussians. More Gaussians make a grid point this many
# times as expensive, and above `_MANY` the cost grows with their number.
_PLAIN, _MIXTURE_WORK, _MANY = 2, 20.0, 64

# Capping losses may add this share to delta.
_CAP_SHARE = 1e-7


def _cap(prepared: Sequence[Prepared], direction: Direction, epsilon: float) -> float:
    """A loss of one step above which splitting it hardly changes delta at `epsilon`.

    Splitting costs at most P(one loss > cap) P(the other losses < epsilon - cap). The second
    chance is at most that of a very negative loss, plus Chernoff's bound without such losses.
    """
    wanted = -math.log(_CAP_SHARE)
    steps = sum(one.count for one in prepared)
    kinds: list[tuple[int, Floats, Floats]] = []
    for one in prepared:
        loss, log_mass = tilted(*one.losses, direction, 0.0)
        order = np.argsort(loss)
        loss, mass = loss[order], np.exp(log_mass[order])
        rare = int(np.searchsorted(np.cumsum(mass), _CAP_SHARE / steps))
        kinds.append((one.count, np.maximum(loss, loss[min(rare, len(loss) - 1)]), mass))
    margin = wanted
    for power in range(1, 20):
        slope = float(1 << power)
        value = 0.0
        for count, loss, mass in kinds:
            low = float(loss[0])
            value += count * (math.log(float(np.exp(-slope * (loss - low)) @ mass)) - slope * low)
        margin = min(margin, (max(value, 0.0) + wanted) / slope)
    # If the guess of epsilon is a little too low, the true epsilon must still be below the cap.
    return 1.02 * epsilon + margin


def saddle(
    prepared: Sequence[Prepared], direction: Direction, epsilon: float, start: float
) -> tuple[float, float]:
    """The tilt that centres the loss on epsilon, and an estimate of log delta there."""
    if sum(one.largest_loss(direction) * one.count for one in prepared) <= epsilon:
        # This direction cannot reach epsilon at all, so any tilt of a likely size will do.
        return 20 / epsilon, -math.inf

    def moments(tilt: float) -> tuple[float, float, float]:
        parts = [one.moments(direction, tilt) for one in prepared]
        value, mean, variance = (sum(column) for column in zip(*parts, strict=True))
        return value, mean, variance

    tilt = compose.centred(moments, epsilon, start, within=0.02, most=1e6)
    value, _, variance = moments(tilt)
    return tilt, compose.saddle_estimate(value, variance, tilt, epsilon)


def _spacing(
    prepared: Sequence[Prepared], direction: Direction, tilt: float, allowed: float
) -> float:
    """The widest grid whose excess of epsilon is about `allowed`."""

    def excess(spacing: float) -> float:
        return sum(
            one.count * excess_of_spacing(*one.losses, direction, tilt, spacing) for one in prepared
        )

    steps = sum(one.count for one in prepared)
    spacing = math.sqrt(12 * allowed / (steps * (1 + tilt)))
    # Mass close to a grid point costs less than the rule says. Then a wider grid is enough.
    for _ in range(20):
        if excess(2 * spacing) > allowed:
            break
        spacing *= 2
    return spacing


def composed(
    prepared: Sequence[Prepared],
    direction: Direction,
    epsilon: float,
    tolerance: float,
    delta: float,
) -> Composed:
    """The loss of the whole mechanism near `epsilon`, on a grid that adds about `tolerance`.

    `delta` is roughly the delta that is expected there. It decides how much rounding may matter.
    """
    cap = _cap(prepared, direction, epsilon)
    shown = [one.capped(direction, cap) for one in prepared]
    tilt, _ = saddle(shown, direction, epsilon, 1.0)
    # With a larger tilt this direction hardly reaches epsilon, and a coarse grid is enough.
    tilt = min(tilt, _LARGEST_EXPONENT / epsilon)
    allowed, resolution = tolerance * epsilon / 2, math.sqrt(tolerance / 2)
    spacing = min(_spacing(shown, direction, tilt, allowed), resolution * epsilon)
    focus = Focus(
        epsilon=epsilon,
        tilt=tilt,
        spacing=max(spacing, _largest_size(shown) / _LARGEST_INDEX),
        allowed=allowed / len(prepared),
        resolution=resolution,
        cap=cap,
    )
    parts = [(one.atoms(direction, focus), one.count) for one in prepared]
    return compose.compose(parts, epsilon, start=tilt, delta=delta)


def _largest_size(prepared: Sequence[Prepared]) -> float:
    """How far from 0 a loss can be."""
    return max(float(np.abs(one.losses[0]).max()) for one in prepared)


def delta_bound(mechanism: Sequence[Step], epsilon: float, *, hint: float) -> float:
    """An upper bound on delta at `epsilon` in the worse direction; `hint` is roughly its size."""
    noise = _noise_of_one_gaussian(mechanism)
    if noise is not None:
        return math.exp(gaussian.log_delta(1 / noise, epsilon))
    prepared = prepare(mechanism, hint)
    found = max(
        # The grid is in proportion to epsilon, so next to 0 it would have no end.
        composed(prepared, way, max(epsilon, _least_focus(prepared, way)), TOLERANCE, hint).delta(
            epsilon
        )
        for way in directions(prepared)
    )
    # With little noise the coins are all that is left to guess.
    return float(min(found, chance_of_moving(mechanism)))


def _least_focus(prepared: Sequence[Prepared], direction: Direction) -> float:
    """An epsilon that is small beside the deviation of the whole loss.

    With little noise, a loss may be all but certain, and have no deviation that can be seen.
    """
    parts = [one.moments(direction, 0.0) for one in prepared]
    _, mean, variance = (sum(column) for column in zip(*parts, strict=True))
    return max(0.1 * math.sqrt(variance), 1e-3 * abs(mean), _LEAST_FOCUS)


def epsilon_bound(
    mechanism: Sequence[Step], delta: float, *, tolerance: float = TOLERANCE
) -> float:
    """An upper bound on the epsilon at which the mechanism is (epsilon, delta)-DP.

    >>> step = Mixture(
    ...     noise=2.0, shifts=np.array([0.0, 1.0]), weights=np.array([0.99, 0.01]), count=2000)
    >>> round(epsilon_bound([step], 1e-6), 3)
    1.035
    """
    noise = _noise_of_one_gaussian(mechanism)
    if noise is not None:
        return gaussian.epsilon(1 / noise, delta)
    if chance_of_moving(mechanism) <= delta:
        return NOTHING
    closed = mild.dominating(joined(mechanism), delta)
    if closed is not None and closed.is_tight:
        return max(closed.epsilon(delta), NOTHING)
    prepared = prepare(mechanism, delta)
    worse, *others = sorted(
        directions(prepared), key=lambda way: _renyi_epsilon(prepared, way, delta), reverse=True
    )
    result = _epsilon_of(prepared, worse, delta, tolerance)
    for other in others:
        if math.isfinite(result) and delta_at(prepared, other, result, tolerance, delta) > delta:
            result = max(result, _epsilon_of(prepared, other, delta, tolerance))
    return result


def renyi_epsilon(mechanism: Sequence[Step], delta: float) -> float:
    """Epsilon in the worse direction by the best single moment, integrated numerically."""
    prepared = prepare(mechanism, delta)
    return max(_renyi_epsilon(prepared, way, delta) for way in directions(prepared))


def interval_for(
    mechanism: Sequence[Step], epsilon: float, delta: float, excess: float
) -> tuple[float, float]:
    """The widest uniform grid that adds about `excess` (relative) to epsilon, and its work.

    The work counts the points of one step's grid, plus a tenth of the points of all steps together.
    For mixtures, `dp_accounting` finds the points of a step one by one.
    """
    prepared = prepare(mechanism, delta)
    # The worse direction decides epsilon, and the grid of the other one is no harder.
    ways = [(way, *saddle(prepared, way, epsilon, 1.0)) for way in directions(prepared)]
    way, tilt, _ = max(ways, key=lambda found: found[2])
    spacing = _spacing(prepared, way, tilt, excess * epsilon)
    spacing = min(spacing, math.sqrt(excess) * epsilon, 1.0)
    work = 0.0
    for one in prepared:
        _, _, variance = one.moments(way, 0.0)
        points = float(np.ptp(one.losses[0])) / spacing
        mixed = max(_components(branch.pair) for branch in one.branches)
        a_point = 1.0 if mixed <= _PLAIN else _MIXTURE_WORK * max(1.0, mixed / _MANY)
        work += points * a_point + 1.2 * math.sqrt(variance) / spacing
    return spacing, work


def _components(pair: Outputs) -> int:
    """How many Gaussians a pair mixes."""
    return len(pair.shifts) if isinstance(pair, MixturePair | Exchange) else 1


def _noise_of_one_gaussian(mechanism: Sequence[Step]) -> float | None:
    """The noise of the one Gaussian that the mechanism is, where no step samples; else None."""
    match joined(mechanism):
        case [Mixture(is_gaussian=True, noise=noise)]:
            return noise
        case _:
            return None


def _renyi_epsilon(prepared: Sequence[Prepared], direction: Direction, delta: float) -> float:
    """Epsilon by the best single moment: a little too large, never by much.

    delta <= e^(K(t) - t epsilon) t^t / (1 + t)^(1 + t) for every t > 0 (Canonne et al. 2020, Prop.
    12).
    """

    def bound(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        value = sum(one.moments(direction, tilt)[0] for one in prepared)
        entropy = tilt * log_tilt - (1 + tilt) * math.log1p(tilt)
        return (value - math.log(delta) + entropy) / tilt

    grid = np.linspace(math.log(1e-3), math.log(1e5), 24)
    values = [bound(float(at)) for at in grid]
    best = int(np.argmin(values))
    low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(grid) - 1)])
    for _ in range(8):
        third = (high - low) / 3
        if bound(low + third) < bound(high - third):
            high -= third
        else:
            low += third
    return max(min(bound((low + high) / 2), values[best]), 0.0)


def _epsilon_of(
    prepared: Sequence[Prepared], direction: Direction, delta: float, tolerance: float
) -> float:
    """The bound in one direction: composed at a guess of epsilon, until the guess is right."""
    epsilon = _renyi_epsilon(prepared, direction, delta)
    if epsilon <= NOTHING:
        # This is a bound already. At exactly zero the grids below would have no spacing.
        return NOTHING
    best, too_low, allowed = math.inf, 0.0, COARSE_TOLERANCE
    for _ in range(60):
        found = composed(prepared, direction, epsilon, allowed, delta)
        solved = _solve(found, delta, epsilon)
        best = min(best, solved)
        if math.isinf(solved):
            # The guess was too low: losses above it were split, and infinity got more than delta.
            too_low = max(too_low, epsilon)
            epsilon = (too_low + best) / 2 if math.isfinite(best) else 1.5 * epsilon
            if epsilon > _LARGEST_GUESS:
                break
        elif solved <= NOTHING:
            break
        elif solved <= found.valid_from:
            # Epsilon is below the window. All that is known is that it is not above.
            epsilon = max(0.9 * solved, (too_low + solved) / 2)
        elif allowed <= tolerance and abs(solved - epsilon) <= 0.02 * epsilon:
            break
        else:
            allowed = tolerance if abs(solved - epsilon) <= 0.02 * epsilon else allowed
            epsilon = solved
        if allowed <= tolerance and best - too_low <= tolerance * best:
            break
    return best


def delta_at(
    prepared: Sequence[Prepared],
    direction: Direction,
    epsilon: float,
    tolerance: float,
    hint: float,
) -> float:
    """An upper bound on delta at `epsilon` in one direction; `hint` is roughly its size."""
    return composed(prepared, direction, epsilon, tolerance, hint).delta(epsilon)


def _solve(composed: Composed, delta: float, guess: float) -> float:
    """The least epsilon (to 1e-9, rounded up) whose delta bound is at most `delta`."""
    if composed.beyond + composed.infinite > delta:
        return math.inf
    low = max(composed.valid_from, 0.0)
    if composed.delta(low) <= delta:
        return max(low, NOTHING)

    def excess(epsilon: float) -> float:
        return math.log(max(composed.delta(epsilon), 1e-300) / delta)

    start = max(guess, low)
    missed, met = roots.bracket(excess, start, 0.01 * start, growth=2.0, least=low)
    return roots.root(excess, missed, met, relative=1e-9)
