"""Faults of real systems that several ranks bring back: rows 5, 6 and 11 of the fault table.

A user is clipped once, whatever rank it is on. The noise is there once. One user moves the sum of
all ranks by at most the clip norm.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from own_loop import Data, Loop, squared_error, usual_plan
from torch import Tensor

from ranks_runner import answers
from userdp import StepSettings
from userdp.updates.filter import Filter

CLIP = 1.0
ROOM = 1 + 1e-5


def everybody(users: int, group_size: int, **changes: object) -> dict[str, object]:
    """Settings under which each user takes part in every step, with up to so many rows."""
    return {
        "num_users": users,
        "expected_cohort_size": users,
        "group_size": group_size,
        "clip_norm": CLIP,
    } | changes


def sums(data: list[Data], plan: dict[str, object], path: str) -> list[Tensor]:
    """The sum of all ranks on each of these data, before noise."""
    settings = StepSettings(path=path, microbatch_tokens=8, microbatch_records=8)  # type: ignore[arg-type]
    return [
        Loop.of(one, usual_plan(**plan), settings=settings).sum_of_next().double() for one in data
    ]


def neighbours(width: int = 6) -> list[Data]:
    """One dataset with a user of 64 rows, and variants in which only that user differs."""
    rng = torch.Generator().manual_seed(0)
    owners = ["big"] * 64 + [f"u{user}" for user in range(11) for _ in range(1 + user % 3)]
    x = torch.randn(len(owners), width, generator=rng)
    y = 10 * torch.randn(len(owners), generator=rng)
    usual = Data(owners=owners, x=x, y=y)
    is_big = torch.tensor([owner == "big" for owner in owners])

    def with_big(value: Tensor) -> Data:
        return replace(usual, y=torch.where(is_big, value, y))

    return [
        usual,
        usual.without("big"),
        with_big(torch.tensor(1e18)),
        with_big(torch.tensor(float("nan"))),
        with_big(-y),
    ]


@pytest.mark.parametrize("path", ["fast", pytest.param("plain", marks=pytest.mark.slow)])
def test_one_user_moves_the_sum_of_four_ranks_by_at_most_the_clip_norm(path: str) -> None:
    plan = everybody(12, 64)
    found = answers(4, lambda _: sums(neighbours(), plan, path))
    alone = sums(neighbours(), plan, path)
    for ours, theirs in zip(found[0], alone, strict=True):
        assert float((ours - theirs).norm()) <= 1e-5 * float(theirs.norm())
    whole, without, huge, broken, turned = found[0]
    # Row 6: 64 rows in 8 microbatches, and clipped once.
    assert CLIP * 0.99 < float((whole - without).norm()) <= CLIP * ROOM
    assert float((huge - without).norm()) <= CLIP * ROOM
    # Row 5: what is not finite counts as zero, and the others are as they were.
    assert float((broken - without).norm()) <= 1e-6
    assert float((turned - without).norm()) <= CLIP * ROOM
    # Every rank has the same bits.
    for rank in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(rank, found[0], strict=True))


def noise_alone(count: int) -> list[Tensor]:
    """One step without any gradient, on a model of a million weights."""
    data = Data.of(8, width=1_000_000)
    plan = usual_plan(num_users=8, expected_cohort_size=4, steps=1, noise_multiplier=1.0)

    def weights(_: int) -> Tensor:
        loop = Loop.of(data, plan, loss=lambda m, b: 0 * squared_error(m, b), rate=4.0)
        before = loop.weights
        return (loop.take_all().weights - before).double() if count else before

    return answers(count, weights)


def test_the_noise_is_there_once_and_the_same_on_any_number_of_ranks() -> None:
    # Row 11. The rate undoes the divisor, so what is seen is the noise itself, of stddev 1. With
    # 10^6 numbers, 1% is 14 standard errors of the stddev, and 0.004 is 2.8 of a correlation
    # between halves; the seed is fixed.
    (alone,) = noise_alone(1)
    several = noise_alone(2)
    assert all(torch.equal(alone, other) for other in several)
    assert abs(float(alone.std()) - 1) < 0.01
    half = len(alone) // 2
    first, second = alone[:half].numpy(), alone[half : 2 * half].numpy()
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.004


def filtered(_: int) -> tuple[Tensor, float, bool]:
    """A run behind the filter: all users are compared with all others."""
    rng = torch.Generator().manual_seed(1)
    users = 200
    x = torch.ones(users, 6) * 0.1 + 0.01 * torch.randn(users, 6, generator=rng)
    data = Data(owners=[str(user) for user in range(users)], x=x, y=torch.zeros(users))
    rule = Filter(concentration=0.2, threshold=0.8, threshold_epsilon=60.0, threshold_delta=1e-4)
    plan = usual_plan(
        num_users=users,
        expected_cohort_size=users,
        group_size=1,
        steps=2,
        update=rule,
        noise_multiplier=4.0,
    )
    loop = Loop.of(data, plan, loss=lambda model, batch: model(batch["x"])[:, 0])
    loop.take_all()
    return loop.weights, loop.step.clip_norm, loop.step.is_halted


def test_the_filter_sees_the_users_of_all_ranks() -> None:
    (alone, _, halted), (first, _, first_halted), (second, _, _) = (
        filtered(0),
        *answers(2, filtered),
    )
    assert halted == first_halted
    # Distances are exact, and the users are in the cohort's order: bit for bit.
    assert torch.equal(first, alone)
    assert torch.equal(second, alone)
