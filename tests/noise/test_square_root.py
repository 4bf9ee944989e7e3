"""Closed forms of strategies (`noise/strategies/square_root.py`) against the workload itself."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.linalg import toeplitz

from userdp.noise.strategies.square_root import inverse_square_root, square_root
from userdp.noise.strategies.workload import Workload


@pytest.mark.parametrize(
    ("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.1), (0.5, 0.05)], ids=str
)
def test_the_square_root_squared_is_the_workload(momentum: float, decay: float) -> None:
    steps = 12
    workload = Workload(steps=steps, momentum=momentum, decay=decay)
    root = np.tril(toeplitz(square_root(workload, steps)))
    inverse = np.tril(toeplitz(inverse_square_root(workload, steps)))
    wanted = workload.apply(np.eye(steps))
    np.testing.assert_allclose(root @ root, wanted, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(root @ inverse, np.eye(steps), rtol=0, atol=1e-12)


def test_the_first_coefficients_of_prefix_sums_are_the_published_ones() -> None:
    # Kalinin and Lampert 2024: 1, 1/2, 3/8, 5/16; the inverse: 1, -1/2, -1/8, -1/16.
    workload = Workload(steps=4)
    assert square_root(workload, 4).tolist() == [1.0, 0.5, 0.375, 0.3125]
    assert inverse_square_root(workload, 4).tolist() == [1.0, -0.5, -0.125, -0.0625]
