"""The error of strategies, its gradient, and the strategies with the least of it."""

from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from userdp.errors import InputError
from userdp.noise.strategies.bands import Bands, identity
from userdp.noise.strategies.error import squared_inverse
from userdp.noise.strategies.optimise import (
    final_error,
    mean_error,
    optimised,
    optimised_toeplitz,
)
from userdp.noise.strategies.workload import Workload

WORKLOADS = [
    {},
    {"momentum": 0.9},
    {"decay": 0.05, "schedule": "linear"},
    {"momentum": 0.5, "decay": 0.01, "schedule": "cosine", "warmup_steps": 1},
]


def dense(columns: np.ndarray) -> np.ndarray:
    """The matrix whose column s begins at row s."""
    n = len(columns)
    matrix = np.zeros((n, n))
    for s in range(n):
        length = min(columns.shape[1], n - s)
        matrix[s : s + length, s] = columns[s, :length]
    return matrix


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_error_and_gradient_are_those_of_the_dense_inverse(n: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns = 0.5 * rng.standard_normal((n, width))
    columns[:, 0] = 1 + rng.random(n)
    value, gradient = squared_inverse(columns)
    inverse = np.linalg.inv(dense(columns))
    assert value == pytest.approx((inverse**2).sum(), rel=1e-10)
    # d ||D^-1||^2 = -2 <D^-T D^-1 D^-T, dD>.
    exact = -2 * inverse.T @ inverse @ inverse.T
    for s in range(n):
        length = min(width, n - s)
        assert gradient[s, :length] == pytest.approx(exact[s : s + length, s], rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("numbers", WORKLOADS)
def test_workload_is_the_recurrence_of_the_optimizer(numbers: dict[str, float]) -> None:
    torch = pytest.importorskip("torch")
    n, rate = 9, 0.3
    workload = Workload(steps=n, **numbers)  # type: ignore[arg-type]
    gradients = np.random.default_rng(0).standard_normal((n, 2))
    # torch's own descent, with the decay of AdamW applied by hand before each step.
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=rate, momentum=workload.momentum)
    models = []
    for step, share in enumerate(workload.shares):
        optimizer.param_groups[0]["lr"] = rate * share
        with torch.no_grad():
            x *= 1 - workload.decay * share
        x.grad = torch.from_numpy(gradients[step])
        optimizer.step()
        models.append(x.detach().numpy().copy())
    assert workload.apply(gradients) == pytest.approx(-np.array(models) / rate, rel=1e-12)
    written = workload.apply(np.eye(n))
    inverse = dense(workload.inverse_columns())
    assert inverse @ written == pytest.approx(np.eye(n), abs=1e-10)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 24), st.integers(1, 24), st.sampled_from(WORKLOADS))
def test_optimised_strategies_are_sound_and_no_worse_than_independent_noise(
    n: int, bands: int, numbers: dict[str, float]
) -> None:
    n = max(n, 2) if numbers.get("warmup_steps") else n
    bands = min(bands, n)
    workload = Workload(steps=n, **numbers)  # type: ignore[arg-type]
    written = workload.apply(np.eye(n))
    alone = mean_error(workload, identity(n))
    assert alone == pytest.approx((written**2).sum() / n)
    errors = []
    for strategy in (optimised(workload, bands), optimised_toeplitz(workload, bands)):
        matrix = strategy.dense()
        assert np.linalg.norm(matrix, axis=0).max() <= 1
        assert (np.tril(matrix, -bands) == 0).all()
        assert (matrix == matrix.astype(np.float32)).all()
        noise = written @ np.linalg.inv(matrix)
        assert mean_error(workload, strategy) == pytest.approx((noise**2).sum() / n, rel=1e-9)
        assert final_error(workload, strategy) == pytest.approx((noise[-1] ** 2).sum(), rel=1e-9)
        errors.append(mean_error(workload, strategy))
    # Rounding to float32 costs up to 2e-6.
    assert errors[0] <= errors[1] * (1 + 3e-6)
    assert errors[1] <= alone * (1 + 3e-6)


def test_two_steps_have_the_error_that_one_finds_by_hand() -> None:
    # With X = C^T C = [[1, x], [x, 1]] the error is (3 - 2x) / (1 - x^2) / 2, least at
    # x = (3 - sqrt 5) / 2.
    x = (3 - math.sqrt(5)) / 2
    found = mean_error(Workload(steps=2), optimised(Workload(steps=2), 2))
    assert found == pytest.approx((3 - 2 * x) / (1 - x**2) / 2, rel=3e-6)


@pytest.mark.parametrize("steps", [4, 12, 100])
def test_all_bands_come_near_the_lower_bound_for_prefix_sums(steps: int) -> None:
    # Henzinger, Upadhyay and Upadhyay 2023: no factorisation has a mean error below (the sum of the
    # singular values of A / n)^2. Those of prefix sums are 1 / (2 sin((2j - 1) pi / (4n + 2))).
    singular = [
        1 / (2 * math.sin((2 * j - 1) * math.pi / (4 * steps + 2))) for j in range(1, steps + 1)
    ]
    bound = (sum(singular) / steps) ** 2
    found = mean_error(Workload(steps=steps), optimised(Workload(steps=steps), steps))
    assert bound <= found <= 1.08 * bound


# Steps, bands, and the mean error of jax_privacy 2.0.0 (jax 0.10.2): `banded.optimize` and
# `toeplitz.optimize_banded_toeplitz`, each with 400 iterations.
OF_JAX_PRIVACY = [
    (2, 2, 1.309016994, 1.357003205),
    (4, 2, 1.886602119, 1.946375749),
    (8, 4, 2.390788288, 2.508783879),
    (12, 3, 3.343994780, 3.450072419),
    (12, 12, 2.583586772, 2.768316534),
    (50, 5, 7.350275579, 7.538440982),
    (200, 16, 10.757923783, 11.099883638),
]


@pytest.mark.parametrize(("steps", "bands", "general", "toeplitz"), OF_JAX_PRIVACY)
def test_errors_are_those_of_jax_privacy(
    steps: int, bands: int, general: float, toeplitz: float
) -> None:
    workload = Workload(steps=steps)
    assert mean_error(workload, optimised(workload, bands)) == pytest.approx(general, rel=5e-6)
    found = mean_error(workload, optimised_toeplitz(workload, bands))
    assert found == pytest.approx(toeplitz, rel=5e-6)


@pytest.mark.parametrize(("bands", "theirs"), [(2, 253.456644491), (3, 171.493576057)])
def test_few_bands_for_many_steps_are_found_as_well(bands: int, theirs: float) -> None:
    # A first trial that goes too far meets noise without bound, which must not end the search.
    # `toeplitz.optimize_banded_toeplitz` of jax_privacy 2.0.0 for 1,000 steps, 500 iterations.
    workload = Workload(steps=1000)
    found = mean_error(workload, optimised_toeplitz(workload, bands))
    assert found == pytest.approx(theirs, rel=5e-6)


def test_error_for_momentum_and_a_falling_rate_is_that_of_jax_privacy() -> None:
    # `banded.optimize` of jax_privacy 2.0.0 for momentum 0.9 and rates 40/40, 39/40, ..., 1/40.
    theirs = 90.463724337
    workload = Workload(steps=40, momentum=0.9, schedule="linear")
    assert mean_error(workload, optimised(workload, 6)) == pytest.approx(theirs, rel=5e-6)


@pytest.mark.slow
def test_objective_is_no_worse_than_that_of_jax_privacy_side_by_side() -> None:
    if importlib.util.find_spec("jax_privacy") is None:
        pytest.skip("jax_privacy is not installed")
    import jax

    jax.config.update("jax_enable_x64", True)
    from jax_privacy.matrix_factorization import banded

    theirs = float(banded.per_query_error(banded.optimize(300, bands=12)).mean())
    workload = Workload(steps=300)
    assert mean_error(workload, optimised(workload, 12)) <= 1.001 * theirs


def test_strategies_are_the_same_every_time() -> None:
    workload = Workload(steps=60, momentum=0.9)
    first = optimised(workload, 8).coefficients
    optimised.cache_clear()
    optimised_toeplitz.cache_clear()
    assert (optimised(workload, 8).coefficients == first).all()


def test_more_bands_than_steps_and_columns_that_are_too_long_are_refused() -> None:
    with pytest.raises(InputError, match="bands=9"):
        optimised(Workload(steps=8), 9)
    with pytest.raises(InputError, match="above 1"):
        Bands(steps=3, coefficients=np.array([[0.8, 0.61]]))
    with pytest.raises(InputError, match="positive diagonal"):
        Bands(steps=3, coefficients=np.array([[0.0, 0.5]]))
    # The first column is too long; the rows are not.
    rows = np.array([[0.9, 0.0], [0.2, 0.9]])
    with pytest.raises(InputError, match="above 1"):
        Bands(steps=2, coefficients=rows)


def test_ten_thousand_steps_need_no_square_of_them() -> None:
    import tracemalloc

    workload = Workload(steps=10_000)
    tracemalloc.start()
    found = mean_error(workload, optimised_toeplitz(workload, 32))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 10_000 * 34 * 8
    assert found < mean_error(workload, identity(10_000)) / 10
