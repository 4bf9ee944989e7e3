"""Draws of the discrete Gaussian have exactly its distribution."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scipy import stats

from userdp.errors import InputError
from userdp.noise import discrete_draw
from userdp.noise.discrete_draw import discrete_gaussian, exp_bounds


def rng(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=seed))


def pmf(variance: int) -> tuple[np.ndarray, np.ndarray]:
    """The support that matters, and the probabilities, by the formula."""
    reach = math.ceil(12 * math.sqrt(variance)) + 2
    n = np.arange(-reach, reach + 1)
    weight = np.exp(-(n.astype(float) ** 2) / (2 * variance))
    return n, weight / weight.sum()


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """The p-value of the counts, with rare values put together."""
    total = counts.sum()
    common = probabilities * total >= 10
    seen = np.append(counts[common], counts[~common].sum())
    wanted = np.append(probabilities[common], probabilities[~common].sum()) * total
    keep = wanted > 1e-3
    assert seen[~keep].sum() == 0
    return float(stats.chisquare(seen[keep], wanted[keep] * total / wanted[keep].sum()).pvalue)


@pytest.mark.statistical
@pytest.mark.parametrize("variance", [1, 2, 3, 7, 50, 1000])
def test_draws_have_the_distribution_of_the_formula(variance: int) -> None:
    # 200,000 draws; p > 0.001 each, seed fixed: a correct sampler fails for one seed in 170.
    draws = discrete_gaussian(200_000, variance=variance, rng=rng(variance))
    values, probabilities = pmf(variance)
    counts = np.array([(draws == n).sum() for n in values])
    assert counts.sum() == len(draws)
    assert chi_square(counts, probabilities) > 0.001


@pytest.mark.statistical
@pytest.mark.parametrize("variance", [10**6, 12_345_678_901, 2**50 + 1, 4**45])
def test_wide_draws_are_normal_to_what_can_be_told(variance: int) -> None:
    # 200,000 draws, seed fixed: KS p > 0.001; deviation and mean within 5 standard errors.
    draws = discrete_gaussian(200_000, variance=variance, rng=rng(3)) / math.sqrt(variance)
    assert stats.kstest(draws, "norm").pvalue > 0.001
    assert draws.std() == pytest.approx(1.0, abs=5 / math.sqrt(4e5))
    assert draws.mean() == pytest.approx(0.0, abs=5 / math.sqrt(2e5))


@pytest.mark.parametrize("variance", [1, 6, 12_345, 10**13, 4**45])
def test_exact_arithmetic_decides_as_doubles_do(variance: int) -> None:
    by_doubles = discrete_gaussian(300, variance=variance, rng=rng(8))
    exactly = discrete_gaussian(300, variance=variance, rng=rng(8), doubt=1e30)
    assert np.array_equal(by_doubles, exactly)


def test_what_is_in_doubt_is_asked_of_exact_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    exactly: Any = discrete_draw._exactly

    def noted(*given: Any) -> Any:
        asked.append(1)
        return exactly(*given)

    monkeypatch.setattr(discrete_draw, "_exactly", noted)
    discrete_gaussian(100, variance=1000, rng=rng(1))
    assert not asked
    # A thousandth of the calls is closer than a thousandth.
    discrete_gaussian(5000, variance=1000, rng=rng(1), doubt=1e-3)
    assert 1 <= len(asked) <= 40


def test_more_bits_are_drawn_until_a_close_call_is_decided() -> None:
    # The first 64 bits of exp(-1) itself say nothing, and neither do the next 64.
    low = exp_bounds(Fraction(1), 192)[0]
    known, rest = low >> 128, [(low >> 64) % 2**64, 0]
    below, bits, _ = discrete_draw._is_below_exp(known, 64, Fraction(1), lambda: rest.pop(0))
    assert (below, bits, rest) == (True, 192, [])
    rest = [(low >> 64) % 2**64, 2**64 - 1]
    below, bits, _ = discrete_draw._is_below_exp(known, 64, Fraction(1), lambda: rest.pop(0))
    assert (below, bits, rest) == (False, 192, [])


@pytest.mark.parametrize("exponent", [Fraction(0), Fraction(1, 3), Fraction(7), Fraction(900)])
def test_bounds_of_exp_hold_and_are_close(exponent: Fraction) -> None:
    import mpmath

    for bits in (64, 128, 1500):
        low, high = exp_bounds(exponent, bits)
        with mpmath.workprec(3 * bits + 200):
            exact = mpmath.exp(-mpmath.mpf(exponent.numerator) / exponent.denominator) * 2**bits
            assert low <= exact <= high
        assert high - low <= 3


@pytest.mark.parametrize("variance", [0, -1, 4**45 + 1])
def test_variances_that_cannot_be_drawn_exactly_are_refused(variance: int) -> None:
    with pytest.raises(InputError, match="variance"):
        discrete_gaussian(1, variance=variance, rng=rng(0))


def test_nothing_is_drawn_where_nothing_is_asked_for() -> None:
    assert len(discrete_gaussian(0, variance=5, rng=rng(0))) == 0


@pytest.mark.statistical
def test_draws_are_those_of_opendp() -> None:
    # 40,000 draws of each, two-sample chi-square, p > 0.001. OpenDP's randomness cannot be fixed: a
    # correct sampler fails one run in a thousand.
    dp: Any = pytest.importorskip("opendp.prelude")
    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T=int)), dp.l2_distance(T=float)
    theirs = np.array(dp.m.make_gaussian(*space, scale=5.0)([0] * 40_000))
    ours = discrete_gaussian(40_000, variance=25, rng=rng(4))
    edges = np.arange(-13, 14)
    table = [np.bincount(np.digitize(x, edges), minlength=28) for x in (ours, theirs)]
    assert stats.chi2_contingency(np.array(table)).pvalue > 0.001
