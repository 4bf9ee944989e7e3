"""The tilted FFT: its rounding against extended precision, its window against the whole sum."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy import fft

from userdp.accounting import compose, gaussian
from userdp.accounting.discretise import Atoms


def atoms(rng: np.random.Generator, size: int = 200, spacing: float = 0.01) -> Atoms:
    mass = rng.dirichlet(np.ones(size))
    index = np.arange(-size // 2, size - size // 2)
    return Atoms(spacing=spacing, index=index, mass=mass, infinite=0.0, slack=0.0)


def whole_convolution(one: Atoms, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The exact composed masses, by direct convolution in extended precision."""
    mass = np.array([1.0], dtype=np.longdouble)
    for _ in range(count):
        mass = np.convolve(mass, one.mass.astype(np.longdouble))
    first = count * int(one.index[0])
    return one.spacing * np.arange(first, first + len(mass)), mass


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [1, 2, 7, 30])
def test_delta_bound_is_above_the_direct_sum_and_close(seed: int, count: int):
    one = atoms(np.random.default_rng(seed))
    loss, mass = whole_convolution(one, count)
    for epsilon in (0.1, 0.5, 1.5, 4.0):
        over = loss > epsilon
        exact = float((mass[over] * -np.expm1(epsilon - loss[over])).sum())
        found = compose.compose([(one, count)], epsilon).delta(epsilon)
        assert exact <= found
        assert found <= exact * (1 + 1e-6) + 1e-250


@pytest.mark.parametrize("length", [1 << 10, 1 << 14, 1 << 18])
@pytest.mark.parametrize("count", [10, 1000, 100_000])
def test_fft_rounding_stays_within_its_bound(length: int, count: int):
    rng = np.random.default_rng(length + count)
    one = atoms(rng, size=500)
    found, bound, _ = compose._convolve([(one, count)], 0.3, length, 0, length)
    value, _, _ = compose.moments([(one, 1)], 0.3)
    mass = one.mass * np.exp(0.3 * one.spacing * one.index - value)
    wrapped = np.bincount((one.index - one.index[0]) % length, mass, minlength=length)
    spectrum = fft.rfft(wrapped.astype(np.longdouble))
    exact = fft.irfft(spectrum**count, length)
    error = float(np.sqrt(((found - exact) ** 2).sum()))
    assert error <= bound
    assert bound < 1e-6


@pytest.mark.parametrize("length", [1 << 10, 1 << 18])
@pytest.mark.parametrize("count", [1, 1000, 100_000])
def test_fft_bound_is_no_smaller_than_the_theorem_says(length: int, count: int):
    # Higham 2002, Thm. 24.2, both ways, with eta = 9 u as the docs take it (7 u, and room for
    # rounded twiddles and the pass that makes it real), and T products of relative error sqrt(5) u.
    one = atoms(np.random.default_rng(length + count), size=500)
    result, bound, _ = compose._convolve([(one, count)], 0.3, length, 0, length)
    value, _, _ = compose.moments([(one, 1)], 0.3)
    mass = one.mass * np.exp(0.3 * one.spacing * one.index - value)
    wrapped = np.bincount((one.index - one.index[0]) % length, mass, minlength=length)
    unit = 2.0**-53
    level = math.log2(length) * 9 * unit
    theorem = count * (level + math.sqrt(5) * unit) * float(np.linalg.norm(wrapped))
    theorem += level * float(np.linalg.norm(result))
    assert theorem * (1 - 1e-9) <= bound <= 2 * theorem


@pytest.mark.parametrize("count", [1000, 10_000])
def test_delta_covers_every_error_of_the_masses_that_the_fft_may_have_made(count: int):
    # The worst error of a given 2-norm points along the weights that delta gives to the masses.
    one = atoms(np.random.default_rng(count))
    epsilon = 1.5
    composed = compose.compose([(one, count)], epsilon)
    assert composed.rounding > 0
    loss = composed.loss
    weight = np.exp(composed.log_scale - composed.tilt * (loss - loss[0]))
    weight *= np.maximum(-np.expm1(epsilon - loss), 0.0)
    missed = composed.rounding * weight / np.linalg.norm(weight)
    true = dataclasses.replace(
        composed, mass=composed.mass + missed, rounding=0.0, relative=0.0
    ).delta(epsilon)
    assert composed.delta(epsilon) >= true
    # The other allowances do not happen to cover it.
    assert dataclasses.replace(composed, rounding=0.0).delta(epsilon) < true


def test_the_bound_of_the_fft_reaches_the_composed_loss():
    one = atoms(np.random.default_rng(0))
    parts, epsilon = [(one, 30)], 1.5
    composed = compose.compose(parts, epsilon)
    length = 1 << (len(composed.loss) - 1).bit_length()
    _, rounding, relative = compose._convolve(parts, composed.tilt, length, 0, length)
    assert composed.rounding >= rounding * (1 - 1e-12) > 0
    assert composed.relative > relative > 0


def test_infinite_mass_and_mass_above_a_short_window_are_added(monkeypatch: pytest.MonkeyPatch):
    count, epsilon = 30, 0.5
    one = dataclasses.replace(atoms(np.random.default_rng(9)), infinite=1e-3)
    one = dataclasses.replace(one, mass=one.mass * (1 - one.infinite))
    loss, mass = whole_convolution(one, count)
    over = loss > epsilon
    exact = float((mass[over] * -np.expm1(epsilon - loss[over])).sum())
    exact += 1 - (1 - one.infinite) ** count
    whole = compose.compose([(one, count)], epsilon)
    assert exact <= whole.delta(epsilon) <= exact * (1 + 1e-6)
    assert whole.infinite > 0.02
    monkeypatch.setattr(compose, "LARGEST_WINDOW", 1 << 11)
    short = compose.compose([(one, count)], epsilon)
    assert epsilon < short.loss[-1] < whole.loss[-1], "the window ends between epsilon and the end"
    assert short.delta(epsilon) >= exact
    assert dataclasses.replace(short, beyond=0.0).delta(epsilon) < exact


def test_below_the_window_the_bound_is_one_not_a_guess():
    one = atoms(np.random.default_rng(0), size=2000, spacing=0.001)
    composed = compose.compose([(one, 400)], 30.0)
    assert math.isfinite(composed.valid_from)
    assert composed.delta(composed.valid_from - 1.0) == 1.0


def test_epsilon_beyond_every_loss_leaves_only_infinite_mass():
    one = Atoms(
        spacing=0.1, index=np.array([0, 1]), mass=np.array([0.5, 0.4]), infinite=0.1, slack=0.0
    )
    assert compose.compose([(one, 1)], 5.0).delta(5.0) == pytest.approx(0.1)


def test_saddle_estimate_is_exact_for_a_gaussian():
    mu, epsilon = 1.3, 2.0
    tilt = epsilon / mu**2 - 0.5
    value = mu**2 * tilt * (tilt + 1) / 2
    assert compose.saddle_estimate(value, mu**2, tilt, epsilon) == pytest.approx(
        gaussian.log_delta(mu, epsilon), abs=1e-9
    )
