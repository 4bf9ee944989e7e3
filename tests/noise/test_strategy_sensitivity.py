"""How far a user moves C G, against all ways of taking part."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from userdp.errors import InputError, UnaccountedPlanError
from userdp.noise import Banded
from userdp.noise.strategies.bands import Bands
from userdp.noise.strategies.sensitivity import (
    check_separation,
    most_participations,
    toeplitz_sensitivity,
)
from userdp.noise.strategies.unbanded import Buffered, InverseBands


def by_brute_force(matrix: np.ndarray, *, separation: int, participations: int) -> float:
    """The largest norm of C u over every set of steps, with a sign for each step.

    For vectors in place of signs, sum_ij X_ij <u_i, u_j> is at most sum_ij |X_ij|, which the second
    number bounds. Both agree where X = C^T C has no negative entry within a pattern.
    """
    gram = matrix.T @ matrix
    largest = 0.0
    for k in range(1, participations + 1):
        for steps in itertools.combinations(range(len(matrix)), k):
            if any(b - a < separation for a, b in itertools.pairwise(steps)):
                continue
            block = gram[np.ix_(steps, steps)]
            for signs in itertools.product((1.0, -1.0), repeat=k - 1):
                u = np.array([1.0, *signs])
                largest = max(largest, float(u @ block @ u))
            assert np.abs(block).sum() <= largest + 1e-9 or (block < 0).any()
    return math.sqrt(largest)


@settings(max_examples=12, deadline=None)
@given(
    st.integers(2, 12),
    st.integers(1, 5),
    st.integers(0, 3),
    st.integers(1, 4),
    st.sampled_from(["optimised", "toeplitz"]),
)
def test_banded_strategies_have_exactly_the_sensitivity_of_separate_columns(
    n: int, bands: int, more: int, participations: int, strategy: str
) -> None:
    bands = min(bands, n)
    noise = Banded(noise_multiplier=1.0, bands=bands, steps=n, strategy=strategy)  # type: ignore[arg-type]
    matrix = noise.matrix()
    assert isinstance(matrix, Bands)
    given_ = {"separation": bands + more, "participations": participations}
    exact = by_brute_force(matrix.dense(), **given_)
    assert exact <= noise.sensitivity(**given_)
    longest = float(np.linalg.norm(matrix.columns(), axis=1).max())
    assert exact <= math.sqrt(most_participations(n, **given_)) * longest * (1 + 1e-12)
    if strategy == "optimised":
        # Every column has norm 1 but for the room that is left for rounding.
        assert exact == pytest.approx(noise.sensitivity(**given_), rel=3e-6)


def test_users_who_come_back_within_the_bands_are_refused() -> None:
    noise = Banded(noise_multiplier=1.0, bands=4, steps=12)
    with pytest.raises(UnaccountedPlanError, match="at most bands=3"):
        noise.sensitivity(separation=3, participations=2)
    with pytest.raises(UnaccountedPlanError, match="bands=4"):
        check_separation(4, 3)
    # What is refused would really move the sum further.
    moved = by_brute_force(noise.matrix().dense(), separation=3, participations=4)  # type: ignore[union-attr]
    assert moved > 1.05 * math.sqrt(4)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(2, 12),
    st.integers(2, 5),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from(["inverse-square-root", "buffered"]),
)
def test_strategies_without_bands_have_the_sensitivity_of_the_closed_form(
    n: int, bands: int, separation: int, participations: int, strategy: str
) -> None:
    noise = Banded(noise_multiplier=1.0, bands=min(bands, n), steps=n, strategy=strategy)  # type: ignore[arg-type]
    matrix = np.linalg.inv(noise.mixing(n))
    found = noise.sensitivity(separation=separation, participations=participations)
    exact = by_brute_force(matrix, separation=separation, participations=participations)
    assert exact * (1 - 1e-12) <= found <= exact + 3e-6


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(-1, 1), min_size=2, max_size=9),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_coefficients_of_any_sign_and_order_never_cost_less_than_brute_force(
    coefficients: list[float], separation: int, participations: int
) -> None:
    n = len(coefficients)
    matrix = np.zeros((n, n))
    for j, value in enumerate(coefficients):
        matrix += np.diag(np.full(n - j, value), -j)
    found = toeplitz_sensitivity(
        np.array(coefficients), separation=separation, participations=participations
    )
    exact = by_brute_force(matrix, separation=separation, participations=participations)
    assert exact <= found + 1e-12


@pytest.mark.parametrize("bands", [2, 3, 8, 30])
@pytest.mark.parametrize("numbers", [{}, {"momentum": 0.9}, {"decay": 0.01, "momentum": 0.5}])
def test_inverse_square_root_has_falling_positive_coefficients(
    bands: int, numbers: dict[str, float]
) -> None:
    noise = Banded(
        noise_multiplier=1.0,
        bands=bands,
        steps=300,
        strategy="inverse-square-root",
        **numbers,  # type: ignore[arg-type]
    )
    coefficients = noise.matrix().coefficients()  # type: ignore[union-attr]
    assert (coefficients >= 0).all()
    assert (np.diff(coefficients) <= 1e-12).all()


def test_strategies_whose_first_column_is_too_long_are_refused() -> None:
    with pytest.raises(InputError, match="above 1"):
        InverseBands(steps=4, noising=np.array([0.9, -0.3]))
    with pytest.raises(InputError, match="above 1"):
        Buffered(steps=4, diagonal=0.9, decays=(0.5,), scales=(0.6,))
    with pytest.raises(InputError, match="decays"):
        Buffered(steps=4, diagonal=0.5, decays=(1.0,), scales=(0.1,))
    with pytest.raises(InputError, match="positive first one"):
        InverseBands(steps=4, noising=np.array([0.0, -0.3]))
