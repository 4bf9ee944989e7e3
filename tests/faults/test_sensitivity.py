"""Rows 1, 5, 6, 15 of the fault table: how far one user can move the sum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

import models_zoo
from userdp.clipping.plain import clip_update, clipped_sum
from userdp.clipping.rules import FlatClip
from userdp.index import UserIndex
from userdp.plan import Plan
from userdp.step import PrivateStep
from userdp.streams import RunSecret
from userdp.updates.mean_gradient import mean_gradient

TOLERANCE = 1e-5
SHAPES = [(7, 3), (5,), (2, 2, 2)]


def norm_of(tensors: Sequence[torch.Tensor]) -> float:
    return math.sqrt(sum(float(t.double().pow(2).sum()) for t in tensors))


def random_update(rng: np.random.Generator, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of any size: far below the clip norm, far above it, now and then aligned with the axes."""
    scale = 10.0 ** rng.uniform(-4, 4)
    direction = rng.choice(3)
    tensors = []
    for shape in SHAPES:
        values = rng.standard_normal(shape)
        if direction == 1:
            values = np.abs(values)
        if direction == 2:
            values = np.ones(shape)
        tensors.append(torch.from_numpy(scale * values).to(dtype))
    return tensors


def test_row_1_sum_moves_by_at_most_the_clip_norm_over_1000_neighbouring_pairs() -> None:
    rng = np.random.default_rng(1)
    for _ in range(1000):
        dtype = [torch.bfloat16, torch.float32, torch.float64][rng.integers(3)]
        clip_norm = 10.0 ** rng.uniform(-3, 3)
        rule = FlatClip(clip_norm=clip_norm)
        cohort = [random_update(rng, dtype) for _ in range(int(rng.integers(1, 12)))]
        absent = int(rng.integers(len(cohort)))
        like = cohort[0]
        with_user = clipped_sum(cohort, rule, like=like)
        without = clipped_sum(
            [update for number, update in enumerate(cohort) if number != absent], rule, like=like
        )
        moved = norm_of([a.double() - b.double() for a, b in zip(with_user, without, strict=True)])
        assert moved <= clip_norm * (1 + TOLERANCE)


def test_row_1_bound_is_reached_so_the_test_above_could_fail() -> None:
    rule = FlatClip(clip_norm=2.0)
    large = [torch.full((4,), 1e6)]
    moved = norm_of(clipped_sum([large], rule, like=large))
    assert moved == pytest.approx(2.0, rel=TOLERANCE)


def test_row_1_step_divides_after_the_noise_by_the_public_cohort_size() -> None:
    # One user, far outside the clip norm; expected cohort 10: the weights move by lr * C / 10.
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    plan = Plan.sample_users(
        num_users=10,
        expected_cohort_size=10,
        group_size=1,
        steps=1,
        clip_norm=0.5,
        noise_multiplier=0.0,
        delta=1e-2,
        non_private=True,
    )
    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        plan,
        UserIndex.from_owners([0]),
        record_loss=lambda model, batch: 1e9 * model(batch["x"])[:, 0],
    )
    for cohort in step.cohorts():
        step.apply({"x": torch.ones(len(rows), 1, dtype=torch.float64)} for rows in cohort)
    assert abs(model.weight.item()) == pytest.approx(0.5 / 10, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_5_nan_and_inf_users_count_as_zero_and_the_other_98_are_untouched(
    dtype: torch.dtype,
) -> None:
    rng = np.random.default_rng(5)
    rule = FlatClip(clip_norm=1.0)
    healthy = [random_update(rng, dtype) for _ in range(98)]
    poisoned_nan, poisoned_inf = random_update(rng, dtype), random_update(rng, dtype)
    poisoned_nan[1][2] = math.nan
    poisoned_inf[0][0, 0] = -math.inf
    cohort = [*healthy[:30], poisoned_nan, *healthy[30:70], poisoned_inf, *healthy[70:]]
    with_poison = clipped_sum(cohort, rule, like=healthy[0])
    without = clipped_sum(healthy, rule, like=healthy[0])
    assert all(torch.equal(a, b) for a, b in zip(with_poison, without, strict=True))
    assert all(torch.isfinite(total).all() for total in with_poison)


def test_row_5_step_completes_with_a_nan_and_an_inf_user_among_100() -> None:
    inputs = torch.linspace(0.1, 1.0, 100, dtype=torch.float64)[:, None]
    inputs[13], inputs[57] = math.nan, math.inf

    def trained(owners: list[int], x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1).double()
        plan = Plan.sample_users(
            num_users=100,
            expected_cohort_size=100,
            group_size=1,
            steps=3,
            clip_norm=0.1,
            noise_multiplier=0.5,
            delta=1e-3,
        )
        step = PrivateStep(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            plan,
            UserIndex.from_owners(owners),
            record_loss=lambda model, batch: model(batch["x"])[:, 0] ** 2,
            secret=RunSecret.fixed_for_tests(5),
        )
        for cohort in step.cohorts():
            step.apply({"x": x[rows]} for rows in cohort)
        assert step.ledger.steps == 3
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    healthy = [number for number in range(100) if number not in (13, 57)]
    with_poison = trained(list(range(100)), inputs)
    without = trained(list(range(98)), inputs[healthy])
    assert torch.isfinite(with_poison).all()
    assert torch.equal(with_poison, without)


@pytest.mark.parametrize("microbatch_records", [None, 8, 1])
def test_row_6_64_records_over_8_microbatches_are_one_contribution(
    microbatch_records: int | None,
) -> None:
    model = models_zoo.build("gpt2 tied", torch.float32)
    parameters = list(model.parameters())
    lengths = np.random.default_rng(6).integers(2, 12, size=64).tolist()
    update = mean_gradient(
        model,
        parameters,
        models_zoo.ragged_batch(lengths, seed=6),
        microbatch_records=microbatch_records,
    )
    clip_norm = norm_of(update) / 100
    rule = FlatClip(clip_norm=clip_norm)
    contribution = norm_of(clipped_sum([update], rule, like=parameters))
    # Clipping each microbatch would let eight of them through.
    assert contribution <= clip_norm * (1 + TOLERANCE)
    assert contribution == pytest.approx(clip_norm, rel=1e-4)


def test_row_15_10000_bf16_updates_clipped_stay_within_the_bound_measured_in_float64() -> None:
    generator = torch.Generator().manual_seed(15)
    updates = torch.randn(10_000, 513, generator=generator)
    updates *= 10.0 ** torch.empty(10_000, 1).uniform_(-3, 3, generator=generator)
    rule = FlatClip(clip_norm=0.37)
    worst = 0.0
    for update in updates.to(torch.bfloat16):
        # As two parameters of a model would arrive.
        clipped = clip_update([update[:200], update[200:]], rule)
        worst = max(worst, norm_of(clipped))
    assert worst <= rule.clip_norm * (1 + TOLERANCE)
    assert worst > rule.clip_norm * (1 - TOLERANCE)
