"""The tilted FFT: its rounding against extended precision, its window against the whole sum."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import fft

from userdp.accounting import compose
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
