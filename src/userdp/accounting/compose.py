"""delta at an epsilon for many steps: one tilted FFT, with a bound on everything it leaves out.

Let S be the sum of the steps' losses. Then delta(epsilon) = E[(1 - e^(epsilon - S))+] + P(S = inf).
The log moment of S is K(t) = sum_i T_i log sum_j f_i(j) e^(t l_j). The FFT convolves the tilted
masses f(j) e^(t l_j - K) instead of the masses f. At the saddle point, the t where S is centred on
epsilon, the tilted masses are of order one. So the rounding of the FFT is small beside delta,
however small delta is.

To make the result an upper bound, three things are added to the sum:
  * the mass above the window, by Chernoff's bound;
  * the FFT's rounding, by the normwise bound of Higham 2002, Thm. 24.2, carried through the power
    and the inverse transform, then Cauchy-Schwarz against the weights;
  * the relative rounding of masses, tilts and powers, which grows with the number of steps.
Mass below the window wraps around into it, which can only add. Windows are powers of two, because
the theorem is stated for those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from userdp.accounting.discretise import Atoms
from userdp.accounting.normal import UNIT_ROUNDOFF
from userdp.accounting.special import Floats, erfcx

# The error of each level of the FFT. For exact twiddles, Higham 2002, Thm. 24.2 has
# eta = u + gamma_4 (sqrt(2) + u) < 7 u. Ours are rounded once more, and real transforms take one
# more pass.
_FFT_LEVEL = 9 * UNIT_ROUNDOFF

# The finite window may lose this share of delta.
_WINDOW_LOSS = 1e-7
LARGEST_WINDOW = 1 << 23

# For windows longer than this, it pays to look for a better tilt.
_LONG_WINDOW = 1 << 16
# With such a tilt, rounding may add this much (relative) to epsilon.
_SMALL_ROUNDING = 1e-5

# The window begins at this part of epsilon or below, so that it also holds a smaller epsilon.
_BELOW = 0.95

# Entries of a spectrum below this are set to 0.
_VANISHED = 1e-140

Part = tuple[Atoms, int]
Spectrum = NDArray[np.complex128]


def moments(parts: Sequence[Part], tilt: float) -> tuple[float, float, float]:
    """The log moment K(t) of the finite part of S, and the mean and variance under the tilt."""
    value = mean = variance = 0.0
    for atoms, count in parts:
        loss = atoms.spacing * atoms.index
        with np.errstate(divide="ignore"):
            exponent = np.log(atoms.mass) + tilt * loss
        peak = float(exponent.max())
        weight = np.exp(exponent - peak)
        total = float(weight.sum())
        centre = float(weight @ loss) / total
        value += count * (peak + math.log(total))
        mean += count * centre
        variance += count * float(weight @ (loss - centre) ** 2) / total
    return value, mean, variance


def saddle_point(parts: Sequence[Part], epsilon: float, start: float = 1.0) -> float:
    """The tilt t > 0 at which S has mean epsilon, to a tenth of its deviation; or near 0."""
    return centred(lambda tilt: moments(parts, tilt), epsilon, max(start, 1e-6), within=0.1)


def centred(
    moments_at: Callable[[float], tuple[float, float, float]],
    epsilon: float,
    start: float,
    *,
    within: float,
    most: float = math.inf,
) -> float:
    """The tilt at which the mean is epsilon, up to `within` deviations, by Newton's method.

    `moments_at` gives a tilt's log moment, mean and variance. The variance is the derivative of the
    mean, so no other evaluation is needed. The search ends near 0 and above `most`.
    """
    low, high, tilt = 0.0, math.inf, start
    for _ in range(80):
        _, mean, variance = moments_at(tilt)
        gap = mean - epsilon
        if abs(gap) <= within * math.sqrt(variance) or high < 1e-9 or low > most:
            break
        low, high = (tilt, high) if gap < 0 else (low, tilt)
        step = tilt - gap / variance if variance > 0 else math.inf
        if not low < step < high or step > 8 * tilt + 1:
            step = 4 * tilt + 1e-3 if high == math.inf else (low + high) / 2
        tilt = step
    return tilt


def saddle_estimate(value: float, variance: float, tilt: float, epsilon: float) -> float:
    """log delta by the saddle-point approximation: an estimate, exact when S is Gaussian."""
    deviation = math.sqrt(max(variance, 1e-300))
    outer, inner = tilt * deviation, (tilt + 1) * deviation
    factor = (erfcx(outer / math.sqrt(2)) - erfcx(inner / math.sqrt(2))) / 2
    return value - tilt * epsilon + math.log(max(factor, 1e-300))


@dataclass(frozen=True, kw_only=True)
class Composed:
    """The composed loss near one epsilon. It bounds delta from `valid_from` on."""

    valid_from: float
    loss: Floats
    mass: Floats
    log_scale: float
    tilt: float
    beyond: float
    relative: float
    rounding: float
    infinite: float

    def delta(self, epsilon: float) -> float:
        """An upper bound on delta(epsilon)."""
        if epsilon < self.valid_from:
            return 1.0
        first = int(np.searchsorted(self.loss, epsilon, side="right"))
        loss = self.loss[first:]
        if len(loss) == 0:
            return min(1.0, self.beyond + self.infinite)
        with np.errstate(under="ignore", over="ignore", invalid="ignore"):
            weight = np.exp(self.log_scale - self.tilt * (loss - self.loss[0]))
            if not np.isfinite(weight).all():
                return 1.0  # with so little noise the numbers overflow: promise nothing
            weight *= -np.expm1(epsilon - loss)
            inside = float(weight @ self.mass[first:]) * (1 + self.relative)
            noise = self.rounding * math.sqrt(float(weight @ weight))
        return min(1.0, inside + noise + self.beyond + self.infinite)


def compose(
    parts: Sequence[Part], epsilon: float, start: float = 1.0, delta: float = 0.0
) -> Composed:
    """The loss of all parts together, each repeated by its count, in a window around `epsilon`.

    `delta` is roughly the delta that is expected there. Rounding far below it does no harm.
    """
    spacing = parts[0][0].spacing
    offset = sum(count * atoms.slack for atoms, count in parts)
    infinite = -math.expm1(
        sum(count * math.log1p(-min(atoms.infinite, 1 - 1e-16)) for atoms, count in parts)
    ) * (1 + 1e-9)
    lowest = sum(count * int(atoms.index[0]) for atoms, count in parts)
    highest = sum(count * int(atoms.index[-1]) for atoms, count in parts)
    at = epsilon - offset
    if spacing * highest <= at:
        return _without_window(spacing * highest + offset, 0.0, infinite)
    at_start = math.exp(min(0.0, _log_chernoff(parts, at, start)))
    if at_start <= _WINDOW_LOSS * delta:
        return _without_window(epsilon, at_start, infinite)
    tilt = saddle_point(parts, at, start)
    if _window(parts, tilt, at, delta).length > _LONG_WINDOW * spacing:
        tilt = _lower_tilt(parts, tilt, at, delta)
    window = _window(parts, tilt, at, delta)
    value, _, _ = moments(parts, tilt)
    first = max(lowest, math.floor(window.first / spacing))
    last = min(highest, math.ceil(window.last / spacing))
    needed = max(last - first, math.ceil(window.length / spacing))
    length = min(LARGEST_WINDOW, 1 << max(4, needed.bit_length()))
    last = min(last, first + length - 1)
    beyond = 0.0
    if last < highest:
        beyond = math.exp(min(0.0, _tail_above(parts, spacing * last)))
    mass, rounding, relative = _convolve(parts, tilt, length, first - lowest, last - first + 1)
    loss: Floats = spacing * np.arange(first, last + 1, dtype=np.float64) + offset
    log_scale = value - tilt * (spacing * first)
    size = abs(value) + abs(tilt) * spacing * max(abs(first), abs(last))
    return Composed(
        valid_from=float(loss[0]) if first > lowest else -math.inf,
        loss=loss, mass=np.maximum(mass, 0.0), log_scale=log_scale, tilt=tilt,
        beyond=beyond, relative=relative + 8 * UNIT_ROUNDOFF * (size + length),
        rounding=rounding, infinite=infinite,
    )  # fmt: skip


def _lower_tilt(parts: Sequence[Part], tilt: float, at: float, delta: float) -> float:
    """The least tilt up to `tilt` at which rounding stays small beside `delta`.

    Where one rare loss decides, the saddle point makes several of them likely. Then the window is
    long, and most of its sums hardly matter. Any tilt is sound, and a lower one makes those sums
    rare again.
    """
    spacing = parts[0][0].spacing
    for factor in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
        lower = factor * tilt
        value, _, _ = moments(parts, lower)
        # `_convolve` and `Composed.delta` will find this rounding. The weights are u e^(-t u) at
        # a distance u above epsilon.
        norm = sum(count * _norm(atoms, lower) for atoms, count in parts)
        rounding = norm * math.log2(LARGEST_WINDOW) * _FFT_LEVEL
        rounding *= math.exp(min(value - lower * at, 0.0)) / math.sqrt(4 * lower**3 * spacing)
        # If delta changes by a share, epsilon moves by that share divided by the tilt.
        if rounding <= min(_SMALL_ROUNDING * lower * at, 0.01) * delta:
            return lower
    return tilt


def _norm(atoms: Atoms, tilt: float) -> float:
    """The 2-norm of one step's tilted masses."""
    with np.errstate(divide="ignore", under="ignore"):
        exponent = np.log(atoms.mass) + tilt * atoms.spacing * atoms.index
        mass = np.exp(exponent - exponent.max())
    return float(np.sqrt(mass @ mass) / mass.sum())


@dataclass(frozen=True, kw_only=True)
class _Window:
    """The sums from `first` to `last` are wanted. `length` keeps other sums from wrapping there."""

    first: float
    last: float
    length: float


def _window(parts: Sequence[Part], tilt: float, at: float, delta: float) -> _Window:
    """Where the tilted S may fall around `at`, except for the share that may be lost."""
    value, mean, variance = moments(parts, tilt)
    deviation = math.sqrt(max(variance, 1e-300))
    # The log of exp(K - tilt epsilon) / delta. If delta is not known, it is estimated.
    over = math.log1p(2.5 * tilt * (1 + tilt) * deviation)
    if delta > 0:
        over = max(0.0, value - tilt * at - math.log(delta))
    budget = over - math.log(_WINDOW_LOSS)
    reach = math.sqrt(2 * budget) / deviation
    below = above = math.inf
    # Beyond `last` S has little mass: P(S >= last) <= exp(K(u) - u last) for every u.
    last = at + budget / tilt
    for power in range(-8, 2):
        shift = reach * 1.5 * 2.0**power
        up, down = moments(parts, tilt + shift)[0] - value, moments(parts, tilt - shift)[0] - value
        above = min(above, (budget + up - shift * mean) / shift)
        below = min(below, (budget + down + shift * mean) / shift)
        last = min(last, (budget + up + tilt * at) / (tilt + shift))
    above, below = max(above, 0.0), max(below, 0.0)
    last = max(last, at)
    return _Window(
        first=min(mean - below, _BELOW * at),
        last=last,
        # Sums above the window wrap to below `at`. Sums below it wrap to above `last`.
        length=max(mean + above - at, last - mean + below),
    )


def _without_window(valid_from: float, beyond: float, infinite: float) -> Composed:
    """S is above `valid_from` with chance at most `beyond`, and is infinite with `infinite`."""
    empty = np.empty(0)
    return Composed(
        valid_from=valid_from, loss=empty, mass=empty, log_scale=0.0, tilt=0.0,
        beyond=beyond, relative=0.0, rounding=0.0, infinite=infinite,
    )  # fmt: skip


def _tail_above(parts: Sequence[Part], loss: float) -> float:
    """log of Chernoff's bound on P(S >= loss), at a tilt that suits this loss."""
    return _log_chernoff(parts, loss, saddle_point(parts, loss))


def _log_chernoff(parts: Sequence[Part], loss: float, tilt: float) -> float:
    """log of the bound exp(K(t) - t loss) on P(S >= loss), rounded up."""
    value, _, _ = moments(parts, tilt)
    return value - tilt * loss + 1e-9 * (abs(value) + abs(tilt * loss))


def _convolve(
    parts: Sequence[Part], tilt: float, length: int, shift: int, wanted: int
) -> tuple[Floats, float, float]:
    """The tilted convolution, wrapped; its rounding error in the 2-norm; its relative error."""
    levels = math.log2(length)
    forward = levels * _FFT_LEVEL
    spectrum: Spectrum | None = None
    relative = norm = 0.0
    for atoms, count in parts:
        loss = atoms.spacing * atoms.index
        value, _, _ = moments([(atoms, 1)], tilt)
        with np.errstate(divide="ignore", under="ignore"):
            exponent = np.log(atoms.mass) + tilt * loss - value
            mass = np.exp(exponent)
        finite = exponent > -745.0
        largest = float(np.abs(tilt * loss[finite]).max()) + abs(value)
        relative += count * UNIT_ROUNDOFF * (4 * largest + 64)
        wrapped = np.bincount((atoms.index - atoms.index[0]) % length, mass, minlength=length)
        # |(G + e)^T - G^T| <= T |e| (1 + |e|)^T where |G| <= 1; ||G||_2 = sqrt(length) ||mass||_2.
        norm += count * forward * float(np.sqrt(wrapped @ wrapped))
        power = _power(np.fft.rfft(wrapped), count)
        spectrum = power if spectrum is None else spectrum * power
        # A complex product has relative error sqrt(5) u, and z^T has the errors of T - 1 products.
        norm += count * math.sqrt(5) * UNIT_ROUNDOFF * float(np.sqrt(wrapped @ wrapped))
    assert spectrum is not None
    result = np.fft.irfft(spectrum, length)
    rounding = norm * math.exp(min(700.0, norm * math.sqrt(length)))
    rounding += forward * float(np.sqrt(result @ result)) * 1.01
    # With such an error nothing is known, and no delta below 1 comes out.
    most = math.expm1(min(relative, 700.0))
    return np.roll(result, -(shift % length))[:wanted], rounding, most


def _power(base: Spectrum, exponent: int) -> Spectrum:
    """base ** exponent by repeated squaring, in which the rounding of each product is known."""
    result: Spectrum | None = None
    while exponent:
        if exponent & 1:
            result = base if result is None else result * base
        exponent >>= 1
        if exponent:
            base = base * base
            # Numbers next to underflow are slow to compute with. They are far below the rounding
            # that is counted.
            base[np.abs(base) < _VANISHED] = 0.0
    assert result is not None
    return result
