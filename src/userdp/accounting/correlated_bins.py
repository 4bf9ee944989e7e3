"""Balls in bins with correlated noise: which pair is worst, and two bounds on what it costs.

A user has one of b bins for good, and takes part in the steps s of that bin. The noise is C^-1 z,
so an attacker sees C x + z, where the user adds |C|'s columns times vectors g_s of norm at most 1.
Let c_tj = sum of |C_ts| over the steps s of bin j, and G_ij = sum_t c_ti c_tj.

Claim. The mean of N(m_j, sigma^2 I) over bins j against N(0, sigma^2 I), where m_j is column j of
c, dominates the run, also where g_s depends on earlier outputs. It depends on G / sigma^2 alone,
and a G that is larger in any entry costs more.

Proof. Without the user, the likelihood ratio is R = (1/b) sum_j exp(X_j - E X_j^2 / 2), where row t
of the output adds <mu_tj, n_t> / sigma^2 to X_j. Here n_t is the row's noise, and mu_tj = sum of
C_ts g_s over the steps s of bin j. Given earlier rows this is Gaussian, and <mu_ti, mu_tj> is at
most c_ti c_tj. Kahane's convexity inequality (1986): for Gaussian vectors X and Y with Cov(X) <=
Cov(Y) entry by entry, any weights p_j >= 0 and any convex f,

    E f(sum_j p_j exp(X_j - E X_j^2 / 2)) <= E f(sum_j p_j exp(Y_j - E Y_j^2 / 2)).

So the rows are exchanged for those of the claim, from the last one back to the first. The weights
p_j are what earlier rows have made of 1/b. All hockey-stick divergences, in both directions, are
means of convex f of R.

Every G here is circulant: G_ij = `gram`[|i - j|], the larger of all entries at that distance around
the circle of bins. This costs a little where C is not Toeplitz, and a few numbers say everything.

**The proven bound** (`proven`). Let q = floor(b / w) bins be spread around the circle, at least w
apart, with a random start. A bin drawn from them is a random bin, and telling the start only helps.
Let r be the largest `gram` from distance w on. By Kahane all covariances may be raised to r. Then
X_j = sqrt(r) Z + sqrt(g - r) Z_j, with g = `gram`[0] and independent Z. R is a product: a Gaussian
mechanism at noise sigma / sqrt(r), and an allocation to one of q places at sigma / sqrt(g - r). The
best w is taken; any is sound.

**The simulated bound** (`simulated`) draws X and bounds the mean of (R - e^eps)+ / R_s, for draws
whose density is R_s times that of Q, and R_s = (1/b) sum_j exp(u X_j - u^2 k / 2), with u = 1 + s
and k = g / sigma^2. By Jensen R_s >= R^u e^(-s u k / 2), so where R > e^eps the value is at most
e^(-s eps + s u k / 2): it is bounded, and Chernoff's bound for bounded variables holds. "Add" draws
X shifted down by s times its mean covariance h; there R <= e^-eps means a mean of X of at most
k / 2 - eps, by Jensen again. The seed follows from the numbers, so the result is reproducible. With
a probability of at most `FAILURE` over seeds a simulated epsilon is too small.

Everything here is public.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from dp_accounting import dp_event
from dp_accounting.dp_event import DpEvent

from userdp.accounting.own_events import BallsInBinsBandedDpEvent, RandomAllocationGaussianDpEvent
from userdp.accounting.special import Floats

# The probability, over seeds, that a simulated epsilon is too small.
FAILURE = 1e-9
# How many numbers are drawn for one bound, and how many of them at a time.
_DRAWN, _BLOCK = 40_000_000, 2_000_000
# How often a guess is raised at most, each time with fresh draws.
_TRIES = 8
# Rounding is far below this share of a simulated mean.
_ROUNDING = 1e-9


def gram_of(columns: Floats, bins: int) -> tuple[float, ...]:
    """The numbers `gram` for C with these columns: entry [s, j] is C[s + j, s].

    Rounded up to nine digits, so that machines that differ in the last bit agree on a price.

    >>> gram = gram_of(np.array([[0.8, 0.6], [0.8, 0.6], [1.0, 0.0]]), 3)
    >>> [round(value, 6) for value in gram]
    [1.0, 0.6]
    """
    steps, bands = columns.shape
    columns = np.abs(columns)
    found = np.zeros((bins, bins))
    place = np.arange(steps) % bins
    for apart in range(min(bands, steps)):
        inner = (columns[: steps - apart, apart:] * columns[apart:, : bands - apart]).sum(axis=1)
        first, second = place[: steps - apart], place[apart:]
        np.add.at(found, (first, second), inner)
        if apart:
            np.add.at(found, (second, first), inner)
    row = np.array([float(np.roll(found, -d, axis=1).diagonal().max()) for d in range(bins)])
    row = np.maximum(row, np.roll(row[::-1], 1))
    row = np.ceil(row * (1 + 1e-12) * 1e9) / 1e9
    # What was raised must still be a covariance. More on the diagonal never costs less.
    lack = max(0.0, -float(np.fft.fft(row).real.min()))
    row[0] = math.ceil((row[0] + lack) * 1e9) / 1e9
    half = row[: bins // 2 + 1]
    last = int(np.flatnonzero(half).max())
    return tuple(float(value) for value in half[: last + 1])


def row_of(event: BallsInBinsBandedDpEvent) -> Floats:
    """The first row of the covariance G / sigma^2."""
    row = np.zeros(event.bins)
    for apart, value in enumerate(event.gram):
        row[apart] = row[-apart] = value
    # Numbers that were edited may be no covariance. More on the diagonal never costs less.
    row[0] += max(0.0, -float(np.fft.fft(row).real.min()))
    return row / event.noise_multiplier**2


def proven(event: BallsInBinsBandedDpEvent) -> list[DpEvent]:
    """Events that cost at least as much, for several distances w; the likely best one first."""
    gram, sigma = event.gram, event.noise_multiplier
    found: list[tuple[float, DpEvent]] = []
    widths = sorted({*(round(2 ** (n / 2)) for n in range(40)), len(gram)})
    for width in (w for w in widths if w <= min(len(gram), event.bins)):
        places = event.bins // width
        # In one place nothing is hidden, and all is one Gaussian.
        shared = max(gram[width:], default=0.0) if places > 1 else gram[0]
        alone = max(gram[0] - shared, 0.0)
        parts: list[DpEvent] = []
        if alone > 0:
            noise = sigma / math.sqrt(alone)
            parts.append(RandomAllocationGaussianDpEvent(places, 1, noise))
        if shared > 0:
            parts.append(dp_event.GaussianDpEvent(sigma / math.sqrt(shared)))
        # The variance of R says roughly which one is best.
        size = shared + math.log1p(math.expm1(min(alone / sigma**2, 500.0)) / places) * sigma**2
        found.append((size, dp_event.ComposedDpEvent(parts)))
    return [one for _, one in sorted(found, key=lambda entry: entry[0])]


@dataclass(frozen=True, kw_only=True)
class _Draws:
    """How bounded values are drawn for one direction at one epsilon."""

    row: Floats
    epsilon: float
    remove: bool

    @property
    def tilt(self) -> float:
        """s, which makes the bound on the values the least."""
        if self.remove:
            return max(0.0, self.epsilon / self.row[0] - 0.5)
        return max(0.0, (self.epsilon - self.row[0] / 2) / float(self.row.mean()))

    @property
    def largest(self) -> float:
        """No value is larger."""
        s, k = self.tilt, float(self.row[0])
        if self.remove:
            return math.exp(-s * self.epsilon + s * (1 + s) * k / 2)
        return math.exp(-s * (self.epsilon - k / 2) + s**2 * float(self.row.mean()) / 2)

    def mean(self, samples: int, rng: np.random.Generator) -> float:
        """The mean of so many values, each as a share of the largest."""
        bins, s, k = len(self.row), self.tilt, float(self.row[0])
        scale = np.sqrt(np.maximum(np.fft.rfft(self.row).real, 0.0))
        rows, total = max(1, _BLOCK // bins), 0.0
        for first in range(0, samples, rows):
            z = rng.standard_normal((min(rows, samples - first), bins))
            x = np.fft.irfft(np.fft.rfft(z, axis=1) * scale, bins, axis=1)
            # By symmetry the user is in bin 0.
            x += (1 + s) * self.row if self.remove else -s * float(self.row.mean())
            with np.errstate(over="ignore"):
                ratio = np.exp(x - k / 2).mean(axis=1)
            if self.remove:
                drawn = np.exp((1 + s) * x - (1 + s) ** 2 * k / 2).mean(axis=1)
                values = np.maximum(ratio - math.exp(self.epsilon), 0.0) / drawn
            else:
                weight = np.exp(s * x.mean(axis=1) + s**2 * float(self.row.mean()) / 2)
                values = np.maximum(1 - math.exp(self.epsilon) * ratio, 0.0) * weight
            total += float(np.minimum(values / self.largest, 1.0).sum())
        return total / samples


def above(mean: float, samples: int, failure: float) -> float:
    """What the expectation of values in [0, 1] exceeds with probability `failure` at most.

    Chernoff's bound, in Hoeffding's form: P(mean <= m) <= exp(-n KL(m, p)) for an expectation p.

    >>> round(above(0.0, 1000, 1e-9), 4)
    0.0205
    """
    budget = math.log(1 / failure) / samples

    def divergence(p: float) -> float:
        found = 0.0 if mean <= 0 else mean * math.log(mean / p)
        return found + (0.0 if mean >= 1 else (1 - mean) * math.log((1 - mean) / (1 - p)))

    low, high = min(mean, 1.0), 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if middle >= 1.0 or divergence(middle) >= budget:
            high = middle
        else:
            low = middle
    return high


@lru_cache(maxsize=32)
def simulated(event: BallsInBinsBandedDpEvent, delta: float, at_most: float) -> float | None:
    """An epsilon below `at_most` that holds but for `FAILURE`; None if none is found.

    A small delta is out of reach: a bound is never below about 21 / samples, as a share of the
    largest value.
    """
    row = row_of(event)
    samples = _DRAWN // event.bins
    rng = _rng(event, delta)
    failure = FAILURE / (2 * _TRIES)

    def bound(epsilon: float, remove: bool, fresh: int) -> float:
        draws = _Draws(row=row, epsilon=epsilon, remove=remove)
        if draws.largest * math.log(1 / failure) / samples > delta:
            return math.inf
        found = above(draws.mean(fresh, rng), samples, failure)
        return draws.largest * found * (1 + _ROUNDING)

    # A guess, by few draws. It decides nothing but where the bound is computed.
    low, high = 0.0, at_most
    for _ in range(12):
        middle = (low + high) / 2
        if max(bound(middle, way, max(1000, samples // 20)) for way in (True, False)) > delta:
            low = middle
        else:
            high = middle
    epsilon = 1.003 * high
    for _ in range(_TRIES):
        if epsilon >= at_most:
            return None
        if all(bound(epsilon, way, samples) <= delta for way in (True, False)):
            return epsilon
        epsilon *= 1.01
    return None


def _rng(event: BallsInBinsBandedDpEvent, delta: float) -> np.random.Generator:
    """A generator that depends on these numbers alone, so that a price can be repeated."""
    numbers: Sequence[object] = (event.bins, event.gram, event.noise_multiplier, delta)
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "big")))
