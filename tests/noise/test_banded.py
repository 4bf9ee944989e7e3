"""Correlated noise step by step: what it adds, what it remembers, what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from userdp.errors import InputError
from userdp.noise import Banded, Gaussian, Noise
from userdp.streams import RunSecret

SIZE = 40
STREAMS = RunSecret.fixed_for_tests(3).streams("noise")
EACH_STRATEGY = pytest.mark.parametrize(
    "strategy", ["optimised", "toeplitz", "inverse-square-root", "buffered"]
)


def step_of(noise: Noise, step: int, dtype: torch.dtype = torch.float64, **other: Any) -> Tensor:
    values = torch.zeros(SIZE, dtype=dtype)
    at = {"offset": 0, "size": SIZE, "noise_stddev": 2.0} | other
    noise.add_(values, step=step, streams=STREAMS, **at)
    return values


def banded(strategy: str = "optimised", *, bands: int = 4, steps: int = 30) -> Banded:
    return Banded(noise_multiplier=1.0, bands=bands, steps=steps, strategy=strategy)  # type: ignore[arg-type]


@EACH_STRATEGY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_the_inverse_of_the_strategy_times_independent_noise(
    strategy: str, dtype: torch.dtype
) -> None:
    noise = banded(strategy)
    z = torch.stack([step_of(Gaussian(noise_multiplier=1.0), t, dtype) for t in range(30)])
    started = noise.started()
    found = torch.stack([step_of(started, t, dtype) for t in range(30)])
    matrix = noise.matrix()
    if strategy in ("optimised", "toeplitz"):
        dense = matrix.dense()  # type: ignore[union-attr]
    else:
        first = matrix.coefficients()  # type: ignore[union-attr]
        dense = sum(np.diag(np.full(30 - j, first[j]), -j) for j in range(30))
    expected = np.linalg.solve(dense, z.double().numpy())
    rounding = 1e-12 if dtype == torch.float64 else 1e-5
    assert found.double().numpy() == pytest.approx(expected, abs=rounding, rel=rounding)


@EACH_STRATEGY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_band_is_independent_noise_bit_for_bit(strategy: str, dtype: torch.dtype) -> None:
    started = banded(strategy, bands=1).started()
    for t in range(5):
        assert torch.equal(
            step_of(started, t, dtype), step_of(Gaussian(noise_multiplier=1.0), t, dtype)
        )


def test_what_is_remembered_is_what_was_added_bit_for_bit() -> None:
    started = banded(bands=3).started()
    added = [step_of(started, t, torch.float32, noise_stddev=1.0) for t in range(5)]
    memory = started.state_dict()["memory"]
    assert memory.dtype == torch.float32
    assert torch.equal(memory[4 % 2], added[4])
    assert torch.equal(memory[3 % 2], added[3])


@EACH_STRATEGY
def test_memory_is_no_more_than_one_vector_less_than_bands(strategy: str) -> None:
    started = banded(strategy).started()
    for t in range(6):
        step_of(started, t)
    memory = started.state_dict()["memory"]
    if strategy == "inverse-square-root":
        assert memory is None
    else:
        assert tuple(memory.shape) == (3, SIZE)


@EACH_STRATEGY
def test_steps_come_in_order_and_each_once(strategy: str) -> None:
    started = banded(strategy, steps=6).started()
    with pytest.raises(InputError, match="in their order"):
        step_of(started, 1)
    step_of(started, 0)
    with pytest.raises(InputError, match="in their order"):
        step_of(started, 0)
    for t in range(1, 6):
        step_of(started, t)
    with pytest.raises(InputError, match="in their order"):
        step_of(started, 6)


@EACH_STRATEGY
@pytest.mark.parametrize(
    "changed", [{"noise_stddev": 2.5}, {"size": SIZE + 1}, {"offset": 1, "size": SIZE + 1}]
)
def test_nothing_of_the_noise_may_change_during_a_run(
    strategy: str, changed: dict[str, Any]
) -> None:
    started = banded(strategy).started()
    step_of(started, 0)
    with pytest.raises(InputError, match="nothing of it may change"):
        step_of(started, 1, **changed)
    # Nothing was added or forgotten.
    other = banded(strategy).started()
    step_of(other, 0)
    assert torch.equal(step_of(started, 1), step_of(other, 1))


def test_noise_that_is_not_started_and_runs_of_another_length_are_refused() -> None:
    with pytest.raises(InputError, match="started"):
        step_of(banded(), 0)
    with pytest.raises(InputError, match="that of a run already"):
        banded().started().started()
    with pytest.raises(InputError, match="30 steps, and the run has 31"):
        banded().check_steps(31)
    banded().check_steps(30)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"bands": 0}, "bands=0"),
        ({"bands": 31}, "at most as many bands"),
        ({"bands": 2.5}, "whole number"),
        ({"steps": True}, "whole number"),
        ({"strategy": "best"}, "strategy='best'"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"decay": -0.1}, "decay=-0.1"),
        ({"decays": (0.5,), "scales": (0.1,)}, "buffered"),
        ({"strategy": "buffered", "bands": 2, "decays": (0.5, 0.4), "scales": (0.1, 0.1)}, "fewer"),
    ],
)
def test_numbers_that_make_no_strategy_are_refused(changed: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        replace(banded(), **changed)


DAMAGES = ["more", "other strategy", "long column", "late", "negative", "no memory"]
DAMAGES += ["short memory", "infinite", "unscaled"]


def damaged(state: dict[str, Any], name: str) -> dict[str, Any]:
    memory, coefficients = state["memory"], state["coefficients"]
    return (
        state
        | {
            "more": {"extra": 1},
            "other strategy": {"coefficients": coefficients[:, :-1]},
            "long column": {"coefficients": coefficients * 1.001},
            "late": {"step": 31},
            "negative": {"step": -1},
            "no memory": {"memory": None},
            "short memory": {"memory": memory[:, :-1]},
            "infinite": {"memory": memory * float("inf")},
            "unscaled": {"noise_stddev": None},
        }[name]
    )


@pytest.mark.parametrize("name", DAMAGES)
def test_a_state_that_is_not_this_noise_is_refused(name: str) -> None:
    straight = banded().started()
    for t in range(5):
        step_of(straight, t)
    banded().started().load_state_dict(straight.state_dict())
    with pytest.raises(InputError):
        banded().started().load_state_dict(damaged(straight.state_dict(), name))


def test_a_state_keeps_the_coefficients_that_the_run_began_with() -> None:
    # Another machine may find a strategy that differs in its last bits.
    straight = banded().started()
    for t in range(5):
        step_of(straight, t)
    state = straight.state_dict()
    other = banded("optimised", bands=4).started()
    state["coefficients"] = state["coefficients"] * (1 - 1e-6)
    other.load_state_dict(state)
    assert torch.equal(other.state_dict()["coefficients"], state["coefficients"])


def test_a_state_with_columns_that_overlap_more_than_is_priced_is_refused() -> None:
    # The columns' norm is 1, and eight contributions moved C G by 5.05 where 4.79 was priced.
    running = banded("buffered", bands=3, steps=8).started()
    state = running.state_dict()
    state["coefficients"] = torch.tensor([[0.35, 0.99, 0.99, 0.5, 0.5]], dtype=torch.float64)
    with pytest.raises(InputError, match="the one that is priced"):
        running.load_state_dict(state)


def test_digest_names_the_strategy_and_not_the_multiplier() -> None:
    one = banded()
    assert one.digest == replace(one, noise_multiplier=3.0).digest
    digests = {
        one.digest,
        banded("toeplitz").digest,
        banded(bands=5).digest,
        banded(steps=31).digest,
    }
    assert len(digests) == 4
    assert Gaussian(noise_multiplier=1.0).digest == ""


def test_noise_left_in_the_model_is_what_the_error_says() -> None:
    # 20,000 coordinates, 30 steps: the variance of the sum of all noise is within 5 standard errors
    # of the stated one. Failure 6e-7 for a fresh seed; seed 3.
    from userdp.noise.strategies.optimise import final_error

    noise, size = banded(bands=8), 20_000
    started, total = noise.started(), torch.zeros(size, dtype=torch.float64)
    for t in range(30):
        started.add_(total, offset=0, size=size, noise_stddev=1.0, step=t, streams=STREAMS)
    stated = final_error(noise.workload_matrix, noise.matrix())  # type: ignore[arg-type]
    found = float((total**2).mean())
    assert abs(found - stated) < 5 * stated * (2 / size) ** 0.5
    # Independent noise leaves 30.
    assert stated < 15


def test_buffers_are_chosen_for_users_who_come_back() -> None:
    once = Banded.configured(steps=200, bands=3, strategy="buffered")
    often = Banded.configured(steps=200, separation=20, bands=3, strategy="buffered")
    at = {"separation": 20, "participations": 10}

    def error(noise: Banded) -> float:
        # Prefix sums of what a step adds, times how much noise the price needs.
        models = np.cumsum(noise.mixing(200), axis=0)
        return float((models**2).sum()) / 200 * noise.sensitivity(**at) ** 2

    assert error(often) < 0.95 * error(once)


def test_the_optimizers_numbers_count_only_if_they_are_asked_for() -> None:
    numbers = {"momentum": 0.9, "decay": 0.001}
    asked = Banded.configured(steps=20, optimizer=numbers, bands=3, workload="optimizer")
    assert (asked.momentum, asked.decay) == (0.9, 0.001)
    assert "momentum=0.9" in asked.words
    assert Banded.configured(steps=20, optimizer=numbers, bands=3).momentum == 0
