"""The law of an average of ratios: every sum is spread, never narrowed, and nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from userdp.accounting import averages
from userdp.accounting.convolve import spread_sum


def _laws(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    first, second = np.sort(rng.lognormal(size=7)), np.sort(rng.lognormal(size=9))
    return first, rng.dirichlet(np.ones(7)), second, rng.dirichlet(np.ones(9))


@pytest.mark.parametrize("seed", range(5))
def test_a_sum_on_a_grid_keeps_mass_and_mean_and_is_spread(seed: int):
    first, first_mass, second, second_mass = _laws(seed)
    values = np.add.outer(first, second).ravel()
    masses = np.multiply.outer(first_mass, second_mass).ravel()
    # Some sums lie below the grid and some above it.
    grid = np.geomspace(*np.quantile(values, [0.2, 0.8]), 6)
    found, beyond = spread_sum(first, first_mass, second, second_mass, grid, twice=False)
    points = np.append(0.0, grid)
    assert found.sum() == pytest.approx(1.0)
    assert found @ points + beyond == pytest.approx(masses @ values)
    assert beyond > 0
    assert found[0] > 0
    for level in np.linspace(0.1, 1.2, 30) * values.max():
        true = masses @ np.maximum(values - level, 0.0)
        assert found @ np.maximum(points - level, 0.0) + beyond >= true * (1 - 1e-12)
        true = masses @ np.maximum(level - values, 0.0)
        assert found @ np.maximum(level - points, 0.0) >= true * (1 - 1e-12)


def test_twice_the_same_law_is_the_sum_of_two():
    first, first_mass, _, _ = _laws(1)
    grid = np.geomspace(0.3, 9.0, 20)
    once = spread_sum(first, first_mass, first, first_mass, grid, twice=False)
    again = spread_sum(first, first_mass, first, first_mass, grid, twice=True)
    assert once[0] == pytest.approx(again[0])
    assert once[1] == pytest.approx(again[1])


@pytest.mark.parametrize("noise", [0.3, 1.0, 10.0, 1e5])
@pytest.mark.parametrize("terms", [1, 2, 7, 1000])
def test_masses_sum_to_one_and_the_mean_is_the_number_of_terms(noise: float, terms: int):
    law = averages.of_gaussians(noise, terms, 1e-12, 400)
    assert law.terms == terms
    assert law.masses.sum() == pytest.approx(1.0, abs=1e-10)
    mean = float(law.masses @ law.values) + law.beyond
    # What lies above the first grid is counted as infinite altogether.
    assert terms <= mean * (1 + law.value_error + law.mass_error) <= terms * (1 + 1e-9)
    assert law.beyond <= 1e-10 * terms
    assert (np.diff(law.values) > 0).all()
    assert law.mass_error < 1e-8
    assert law.value_error < 1e-10


def test_one_ratio_is_spread_and_close():
    noise, level = 0.8, np.exp(np.linspace(-4, 4, 17))
    law = averages.gaussian(noise, 1e-14, 1000)
    # E (Y - c)+ = P(Y > c) - c Q(Y > c).
    z = noise * np.log(level) + 1 / (2 * noise)
    true = stats.norm.sf(z - 1 / noise) - level * stats.norm.sf(z)
    above = np.maximum(np.subtract.outer(law.values, level), 0.0)
    found = law.masses @ above + law.beyond
    assert (found >= true * (1 - 1e-12)).all()
    assert found == pytest.approx(true, rel=3e-3)
