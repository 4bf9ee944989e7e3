"""Discrete noise: everything released lies on the grid, and rounding is part of the sensitivity."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from userdp.clipping.rules import AdaptiveClip
from userdp.errors import InputError, UnaccountedPlanError
from userdp.noise import Discrete
from userdp.noise.discrete import ROUNDING_SHARE, lattice
from userdp.plan import Plan
from userdp.sampling import PoissonRecords, PoissonUsers
from userdp.streams import RunSecret
from userdp.units import Adjacency

STREAMS = RunSecret.fixed_for_tests(14).streams("noise")


def released(values: torch.Tensor, multiplier: float, clip_norm: float) -> torch.Tensor:
    values = values.clone()
    noise = Discrete(noise_multiplier=multiplier)
    stddev = noise.noise_stddev(clip_norm)
    size = len(values)
    noise.add_(values, offset=0, size=size, noise_stddev=stddev, step=0, streams=STREAMS)
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_one_of_a_million_outputs_lies_on_the_grid(dtype: torch.dtype) -> None:
    size, clip_norm, multiplier = 1_000_000, 0.37, 1.3
    sums = torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(0)) * 1e-2
    grid, variance = lattice(clip_norm, size, noise_multiplier=multiplier)
    steps = released(sums, multiplier, clip_norm).double() / grid
    assert torch.equal(steps, steps.round())
    assert float((sums.double() / grid % 1 != 0).double().mean()) > 0.9
    # Deviation within 5 standard errors, seed 14; float32 loses nothing that could be told.
    deviation = float((steps - (sums.double() / grid)).std()) / math.sqrt(variance)
    assert deviation == pytest.approx(1.0, abs=5 / math.sqrt(2e6))


@pytest.mark.parametrize("size", [1, 7, 300_000, 10**9])
@pytest.mark.parametrize("clip_norm", [1e-3, 0.5, 1.0, 77.7])
@pytest.mark.parametrize("multiplier", [0.01, 0.8, 30.0])
def test_noise_covers_the_clip_norm_and_rounding_and_hardly_more(
    size: int, clip_norm: float, multiplier: float
) -> None:
    grid, variance = lattice(clip_norm, size, noise_multiplier=multiplier)
    assert math.frexp(grid)[0] == 0.5
    apart = clip_norm / grid + math.sqrt(size)
    assert math.sqrt(variance) >= multiplier * apart
    wanted = multiplier * clip_norm / grid
    # One more squared grid step, where noise is a few steps only.
    assert math.sqrt(variance - 1) <= wanted * (1 + ROUNDING_SHARE) * (1 + 1e-9)


def test_rounded_sums_of_neighbours_are_as_far_apart_as_the_noise_is_for() -> None:
    # Updates that rounding pushes apart as far as it can: each coordinate crosses a half step.
    for size in (1, 4, 100, 5000):
        rng = np.random.default_rng(size)
        grid, variance = lattice(1.0, size, noise_multiplier=1.0)
        worst = 0.0
        for scale in (1.0, 1.0, 1e-3, 1e-6):
            update = rng.standard_normal(size)
            update *= scale / np.linalg.norm(update)
            sums = (rng.integers(-1000, 1000, size) + 0.5) * grid - update * rng.random()
            moved = np.rint((sums + update) / grid) - np.rint(sums / grid)
            worst = max(worst, float(np.linalg.norm(moved)))
        assert worst <= math.sqrt(variance)
        # Rounding alone, without an update of any size, moves half of all coordinates.
        assert size < 100 or np.linalg.norm(moved) > 0.5 * math.sqrt(size)


def test_no_noise_leaves_the_sum_as_it_is() -> None:
    values = torch.randn(5)
    assert torch.equal(released(values, 0.0, 1.0), values)


def plan(**changed: object) -> Plan:
    given: dict[str, object] = {
        "num_users": 100,
        "expected_cohort_size": 10,
        "group_size": 1,
        "steps": 5,
        "clip_norm": 1.0,
        "noise": Discrete(noise_multiplier=0.0),
        "epsilon": 4.0,
        "delta": 1e-5,
    }
    return Plan.sample_users(**(given | changed))  # type: ignore[arg-type]


def test_a_plan_is_calibrated_priced_and_read_back() -> None:
    made = plan()
    assert isinstance(made.noise, Discrete)
    assert made.epsilon() <= 4.0
    assert made.epsilon() == pytest.approx(4.0, rel=1e-3)
    assert Plan.from_json(made.to_json()) == made
    said = str(made.statement())
    assert "whole numbers on a grid" in said
    assert "rounding errors of the clipped sum itself" in said
    assert "Mironov" not in said


def test_what_has_no_proof_has_no_price() -> None:
    with pytest.raises(UnaccountedPlanError, match="replace"):
        plan(adjacency=Adjacency.REPLACE)
    with pytest.raises(UnaccountedPlanError, match="noisy count"):
        plan(clip_norm=None, clip=AdaptiveClip(clip_norm=1.0, count_noise=3.0))
    with pytest.raises(UnaccountedPlanError, match="PoissonRecords"):
        Plan.sample_records(
            num_users=100,
            expected_batch_size=10,
            group_size=2,
            steps=5,
            clip_norm=1.0,
            noise=Discrete(noise_multiplier=0.0),
            epsilon=4.0,
            delta=1e-5,
        )
    assert PoissonUsers.name == PoissonRecords.name


def test_too_much_noise_for_exact_draws_is_refused() -> None:
    with pytest.raises(InputError, match="variance"):
        released(torch.zeros(1), 1e13, 1.0)
