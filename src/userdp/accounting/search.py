"""Our own epsilon and noise multiplier: an upper bound like the certificate, in milliseconds.

A mechanism here is a list of (mixture, count): steps that each cost a mixture of Gaussians,
repeated and composed adaptively. `epsilon_bound` and `delta_bound` never fall below the truth (see
`discretise` and `compose` for why); how far above they may be is chosen by `tolerance`.

The search for a noise multiplier first solves the saddle-point approximation, which costs no FFT,
and then corrects it by a few evaluations of the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from userdp.accounting import compose, gaussian
from userdp.accounting.compose import Composed
from userdp.accounting.discretise import Direction, Focus, discretise, excess_of_spacing, tilted
from userdp.accounting.pair import Floats, Pair, Quadrature

# The excess of epsilon, relative to it, that the grid may cause.
TOLERANCE = 2e-5
COARSE_TOLERANCE = 1e-3

# Of delta, the share that may be spent on cutting off tails.
_TAIL_SHARE = 1e-8

# Calibrated noise is at most this much (relative) above the least that meets the target.
NOISE_TOLERANCE = 1e-5

# An epsilon that is not worth telling from 0: reported as this.
NOTHING = 1e-6

LARGEST_NOISE = 1e7
SMALLEST_NOISE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """One kind of step: Gaussian noise against a user who moves the sum by `shifts` w.p. `weights`.

    Public numbers only; `count` is how often the step is taken.
    """

    noise: float
    shifts: Floats
    weights: Floats
    count: int

    @property
    def is_gaussian(self) -> bool:
        """Whether the user always moves the sum by the same amount: no sampling."""
        return len(self.shifts) == 1


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """A mixture with what choosing tilt and grid needs."""

    pair: Pair
    quadrature: Quadrature
    count: int

    def largest_loss(self, direction: Direction) -> float:
        """The largest finite loss of one step."""
        loss = self.quadrature.loss
        return float(loss[-1]) if direction is Direction.REMOVE else -float(loss[0])

    def moments(self, direction: Direction, tilt: float) -> tuple[float, float, float]:
        """The log moment of all its steps, and the tilted mean and variance."""
        loss, log_mass = tilted(self.quadrature, direction, tilt)
        peak = float(log_mass.max())
        weight = np.exp(log_mass - peak)
        total = float(weight.sum())
        mean = float(weight @ loss) / total
        variance = float(weight @ (loss - mean) ** 2) / total
        return self.count * (peak + math.log(total)), self.count * mean, self.count * variance


def _prepare(mechanism: Sequence[Mixture], delta: float) -> list[_Prepared]:
    steps = sum(mixture.count for mixture in joined(mechanism))
    tail = max(_TAIL_SHARE * delta / steps, 1e-290)
    prepared: list[_Prepared] = []
    for mixture in joined(mechanism):
        pair = Pair.of(mixture.noise, mixture.shifts, mixture.weights, tail=tail / 2)
        quadrature = Quadrature.of(pair, tail / 2)
        prepared.append(_Prepared(pair=pair, quadrature=quadrature, count=mixture.count))
    return prepared


def _saddle(
    prepared: Sequence[_Prepared], direction: Direction, epsilon: float, start: float
) -> tuple[float, float]:
    """The tilt that centres the loss on epsilon, and the estimate of log delta there."""
    if sum(one.largest_loss(direction) * one.count for one in prepared) <= epsilon:
        # This direction cannot reach epsilon at all: any tilt of a likely size will do.
        return 20 / epsilon, -math.inf
    low, high, tilt = 0.0, math.inf, start
    value = variance = 0.0
    for _ in range(60):
        parts = [one.moments(direction, tilt) for one in prepared]
        value, mean, variance = (sum(column) for column in zip(*parts, strict=True))
        gap = mean - epsilon
        if abs(gap) <= 0.02 * math.sqrt(variance) or high < 1e-9 or low > 1e6:
            break
        low, high = (tilt, high) if gap < 0 else (low, tilt)
        step = tilt - gap / variance if variance > 0 else math.inf
        if not low < step < high or step > 8 * tilt + 1:
            step = 4 * tilt + 1e-3 if high == math.inf else (low + high) / 2
        tilt = step
    return tilt, compose.saddle_estimate(value, variance, tilt, epsilon)


def _spacing(
    prepared: Sequence[_Prepared], direction: Direction, tilt: float, allowed: float
) -> float:
    """The widest grid whose excess of epsilon is about `allowed`."""

    def excess(spacing: float) -> float:
        return sum(
            one.count * excess_of_spacing(one.quadrature, direction, tilt, spacing)
            for one in prepared
        )

    steps = sum(one.count for one in prepared)
    spacing = math.sqrt(12 * allowed / (steps * (1 + tilt)))
    # Mass close to a grid point costs less than the rule says: then a wider grid will do.
    for _ in range(20):
        if excess(2 * spacing) > allowed:
            break
        spacing *= 2
    return spacing


def _composed(
    prepared: Sequence[_Prepared],
    direction: Direction,
    epsilon: float,
    tilt: float,
    tolerance: float,
) -> Composed:
    allowed, resolution = tolerance * epsilon / 2, math.sqrt(tolerance / 2)
    focus = Focus(
        epsilon=epsilon,
        tilt=tilt,
        spacing=min(_spacing(prepared, direction, tilt, allowed), resolution * epsilon),
        allowed=allowed / len(prepared),
        resolution=resolution,
    )
    parts = [
        (discretise(one.pair, one.quadrature, direction, count=one.count, focus=focus), one.count)
        for one in prepared
    ]
    return compose.compose(parts, epsilon, start=tilt)


def delta_bound(
    mechanism: Sequence[Mixture], epsilon: float, *, hint: float, tolerance: float = TOLERANCE
) -> float:
    """An upper bound on delta at `epsilon`, the worse direction; `hint` is about its size."""
    prepared = _prepare(mechanism, hint)
    return max(_delta_at(prepared, way, epsilon, tolerance) for way in Direction)


def epsilon_bound(
    mechanism: Sequence[Mixture], delta: float, *, tolerance: float = TOLERANCE
) -> float:
    """An upper bound on the epsilon at which the mechanism is (epsilon, delta)-DP.

    >>> step = Mixture(
    ...     noise=2.0, shifts=np.array([0.0, 1.0]), weights=np.array([0.99, 0.01]), count=2000)
    >>> round(epsilon_bound([step], 1e-6), 3)
    1.035
    """
    exact = _gaussian_epsilon(mechanism, delta)
    if exact is not None:
        return exact
    prepared = _prepare(mechanism, delta)
    worse, other = sorted(
        Direction, key=lambda way: _renyi_epsilon(prepared, way, delta), reverse=True
    )
    result = _epsilon_of(prepared, worse, delta, tolerance)
    if math.isinf(result) or _delta_at(prepared, other, result, tolerance) <= delta:
        return result
    return max(result, _epsilon_of(prepared, other, delta, tolerance))


def epsilon_in(
    mechanism: Sequence[Mixture],
    direction: Direction,
    delta: float,
    *,
    tolerance: float = TOLERANCE,
) -> float:
    """An upper bound on epsilon in one direction only."""
    exact = _gaussian_epsilon(mechanism, delta)
    if exact is not None:
        return exact
    return _epsilon_of(_prepare(mechanism, delta), direction, delta, tolerance)


def renyi_epsilon(mechanism: Sequence[Mixture], delta: float) -> float:
    """Epsilon by the best single moment in the worse direction, integrated numerically."""
    prepared = _prepare(mechanism, delta)
    return max(_renyi_epsilon(prepared, way, delta) for way in Direction)


def interval_for(
    mechanism: Sequence[Mixture], epsilon: float, delta: float, excess: float
) -> tuple[float, float]:
    """The widest uniform grid that adds about `excess` (relative) to epsilon, and its size.

    The size counts grid points times mixture components: what building the grid costs.
    """
    prepared = _prepare(mechanism, delta)
    # The worse direction decides epsilon, and the other one's grid is no harder.
    ways = [(way, *_saddle(prepared, way, epsilon, 1.0)) for way in Direction]
    way, tilt, _ = max(ways, key=lambda found: found[2])
    spacing = _spacing(prepared, way, tilt, excess * epsilon)
    spacing = min(spacing, math.sqrt(excess) * epsilon, 1.0)
    size = sum(
        float(one.quadrature.loss[-1] - one.quadrature.loss[0]) / spacing * len(one.pair.shifts)
        for one in prepared
    )
    return spacing, size


def joined(mechanism: Sequence[Mixture]) -> list[Mixture]:
    """The same mechanism with all unsampled steps as one: Gaussians compose to a Gaussian.

    >>> one = np.array([1.0])
    >>> joined([Mixture(noise=4.0, shifts=one, weights=one, count=4)])[0].noise
    2.0
    """
    sampled = [mixture for mixture in mechanism if not mixture.is_gaussian]
    squares = sum(
        one.count * (float(one.shifts[0]) / one.noise) ** 2 for one in mechanism if one.is_gaussian
    )
    if squares == 0:
        return sampled
    one = np.array([1.0])
    whole = Mixture(noise=1 / math.sqrt(squares), shifts=one, weights=one, count=1)
    return [*sampled, whole]


def _gaussian_epsilon(mechanism: Sequence[Mixture], delta: float) -> float | None:
    """The exact epsilon where no step samples."""
    whole = joined(mechanism)
    if len(whole) != 1 or not whole[0].is_gaussian:
        return None
    return gaussian.epsilon(1 / whole[0].noise, delta)


def _renyi_epsilon(prepared: Sequence[_Prepared], direction: Direction, delta: float) -> float:
    """Epsilon by the best single moment: a little too large, but never far off.

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
    prepared: Sequence[_Prepared], direction: Direction, delta: float, tolerance: float
) -> float:
    """The bound in one direction: composed where epsilon is thought to be, until it is there."""
    epsilon = _renyi_epsilon(prepared, direction, delta)
    if epsilon <= NOTHING:
        # A bound already; of exactly zero the grids below would have no spacing.
        return NOTHING
    solved, allowed = epsilon, COARSE_TOLERANCE
    for _ in range(40):
        tilt, _ = _saddle(prepared, direction, epsilon, 1.0)
        composed = _composed(prepared, direction, epsilon, tilt, allowed)
        solved = _solve(composed, delta, epsilon)
        if math.isinf(solved) or solved <= NOTHING:
            return solved
        if abs(solved - epsilon) <= 0.02 * epsilon:
            if allowed <= tolerance:
                return solved
            allowed = tolerance
        epsilon = solved
    return solved


def _delta_at(
    prepared: Sequence[_Prepared], direction: Direction, epsilon: float, tolerance: float
) -> float:
    tilt, _ = _saddle(prepared, direction, epsilon, 1.0)
    return _composed(prepared, direction, epsilon, tilt, tolerance).delta(epsilon)


def _solve(composed: Composed, delta: float, guess: float) -> float:
    """The least epsilon (to 1e-9, rounded up) whose delta bound is at most `delta`."""
    if composed.beyond + composed.infinite > delta:
        return math.inf
    low = max(composed.valid_from, 0.0)
    if composed.delta(low) <= delta:
        return max(low, NOTHING)
    high = max(guess, low)
    width = 0.01 * high
    while composed.delta(high) > delta:
        low, high, width = high, high + width, 2 * width
    width = 0.01 * high
    while high - width > low and composed.delta(high - width) <= delta:
        high, width = high - width, 2 * width
    low = max(low, high - width)
    for _ in range(80):
        if high - low <= 1e-9 * high:
            break
        middle = (low + high) / 2
        low, high = (middle, high) if composed.delta(middle) > delta else (low, middle)
    return high


@dataclass(frozen=True, kw_only=True)
class Found:
    """A noise multiplier, and how many evaluations of the bound it took."""

    noise_multiplier: float
    evaluations: int


def least_noise(
    mechanism_of: Callable[[float], Sequence[Mixture]],
    *,
    epsilon: float,
    delta: float,
    tolerance: float = TOLERANCE,
) -> Found | None:
    """The least noise multiplier (to 1e-5, above) whose delta bound at `epsilon` meets `delta`.

    None if no noise up to `LARGEST_NOISE` does.
    """
    target = math.log(delta)
    tilts = dict.fromkeys(Direction, 1.0)

    def estimate(log_noise: float) -> float:
        prepared = _prepare(mechanism_of(math.exp(log_noise)), delta)
        values: list[float] = []
        for way in Direction:
            tilts[way], value = _saddle(prepared, way, epsilon, tilts[way])
            values.append(value)
        return max(values) - target

    evaluations = 0

    def bound(log_noise: float, tolerance: float) -> float:
        nonlocal evaluations
        evaluations += 1
        prepared = _prepare(mechanism_of(math.exp(log_noise)), delta)
        saddles = {way: _saddle(prepared, way, epsilon, tilts[way]) for way in Direction}
        best = max(value for _, value in saddles.values())
        result = 0.0
        for way, (tilt, value) in saddles.items():
            # A direction far below the other cannot decide; the certificate takes both anyway.
            if value > best - 3 or tolerance == TOLERANCE:
                result = max(
                    result, _composed(prepared, way, epsilon, tilt, tolerance).delta(epsilon)
                )
        return math.log(max(result, 1e-300)) - target

    exact = _gaussian_noise(mechanism_of, epsilon, delta)
    if exact is not None:
        return exact if exact.noise_multiplier <= LARGEST_NOISE else None
    start = _bracketed(estimate, 0.0)
    if start is None:
        return None
    log_noise, slope = start
    if log_noise <= math.log(SMALLEST_NOISE):
        return Found(noise_multiplier=SMALLEST_NOISE, evaluations=0)
    log_noise, slope = _secant(
        lambda at: bound(at, COARSE_TOLERANCE), log_noise, slope, 2e-3, rise=0.0
    )
    log_noise, _ = _secant(
        lambda at: bound(at, tolerance), log_noise, slope, NOISE_TOLERANCE, rise=0.3
    )
    return Found(noise_multiplier=math.exp(log_noise), evaluations=evaluations)


def _gaussian_noise(
    mechanism_of: Callable[[float], Sequence[Mixture]], epsilon: float, delta: float
) -> Found | None:
    """The exact answer where no step samples and every noise is fixed or the multiplier's multiple.

    Infinite where the fixed ones alone cost more than epsilon.
    """
    pairs = list(zip(mechanism_of(1.0), mechanism_of(2.0), strict=True))
    if not all(one.is_gaussian for one, _ in pairs):
        return None
    if any(two.noise not in (one.noise, 2 * one.noise) for one, two in pairs):
        return None
    fixed = scaled = 0.0
    for one, two in pairs:
        square = one.count * (float(one.shifts[0]) / one.noise) ** 2
        fixed, scaled = (
            (fixed + square, scaled) if two.noise == one.noise else (fixed, scaled + square)
        )
    left = gaussian.sensitivity(epsilon, delta) ** 2 - fixed
    return Found(noise_multiplier=math.sqrt(scaled / left) if left > 0 else math.inf, evaluations=1)


def _bracketed(excess: Callable[[float], float], start: float) -> tuple[float, float] | None:
    """A root (to 1%) of a decreasing function of the log noise, and the slope there."""
    at = start
    value = excess(at)
    step = math.log(2.0) if value > 0 else -math.log(2.0)
    before, before_value = at, value
    while (value > 0) == (step > 0):
        if not math.log(SMALLEST_NOISE) < at < math.log(LARGEST_NOISE):
            return None if step > 0 else (at, -1.0)
        before, before_value = at, value
        at += step
        value = excess(at)
        step *= 1.5
    low, low_value = (before, before_value) if before < at else (at, value)
    high, high_value = (at, value) if before < at else (before, before_value)
    for _ in range(40):
        if high - low < 0.01:
            break
        slope = (high_value - low_value) / (high - low)
        guess = low - low_value / slope if math.isfinite(slope) and slope < 0 else (low + high) / 2
        margin = 0.05 * (high - low)
        guess = min(max(guess, low + margin), high - margin)
        value = excess(guess)
        if value > 0:
            low, low_value = guess, value
        else:
            high, high_value = guess, value
    slope = (high_value - low_value) / (high - low)
    return low - low_value / slope, slope


def _secant(
    excess: Callable[[float], float], at: float, slope: float, tolerance: float, *, rise: float
) -> tuple[float, float]:
    """The root of a decreasing function from above, to `tolerance`, and the slope there."""
    low, high = -math.inf, math.inf
    known: list[tuple[float, float]] = []
    for _ in range(60):
        value = excess(at)
        known.append((at, value))
        if value > 0:
            low = max(low, at)
        else:
            high = min(high, at)
        if len(known) > 1:
            (first, first_value), (second, second_value) = known[-2:]
            if second != first:
                between = (second_value - first_value) / (second - first)
                slope = between if between < -1e-6 else slope
        if value <= 0 and (-value / -slope < tolerance or high - low < tolerance):
            return at, slope
        if high - low < tolerance:
            return high, slope
        step = at - value / slope + rise * tolerance
        step = min(max(step, at - 0.5), at + 0.5)
        if math.isfinite(low) and math.isfinite(high) and not low < step < high:
            step = (low + high) / 2
        elif high == math.inf:
            step = max(step, low + tolerance / 2)
        at = step
    return high, slope
