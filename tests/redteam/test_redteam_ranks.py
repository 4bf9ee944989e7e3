"""Attacks on runs of several ranks."""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from torch import nn

from ranks_runner import on_ranks
from userdp import Plan, PrivateStep, UserIndex
from userdp.errors import StoppedRunError
from userdp.losses import Batch
from userdp.ranks import Ranks
from userdp.streams import RunSecret
from userdp.updates.filter import Filter

USERS, RECORDS = 40, 3


def squared_error(model: nn.Module, batch: Batch) -> torch.Tensor:
    return (model(batch["x"])[:, 0] - 1) ** 2


def step_of(rank: int, *, alike: bool) -> int:
    """Take one step; rank 1 has no lengths unless the ranks are alike."""
    owners = [f"u{user}" for user in range(USERS) for _ in range(RECORDS)]
    model = nn.Linear(2, 1)
    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        Plan.sample_users(
            num_users=USERS,
            expected_cohort_size=30,
            group_size=RECORDS,
            steps=2,
            clip_norm=1.0,
            noise_multiplier=1.0,
            delta=1e-3,
        ),
        UserIndex.from_owners(owners),
        record_loss=squared_error,
        secret=RunSecret.fixed_for_tests(3),
        row_lengths=np.arange(len(owners)) if alike or rank == 0 else None,
    )
    step.check_model({"x": torch.randn(3, 2)})
    step.apply({"x": torch.ones(len(rows), 2)} for rows in step.draw())
    return step.ledger.steps


def test_ranks_that_share_out_users_differently_take_no_step() -> None:
    # 4 of 22 users were on both ranks, and each of them moved the sum by 2 C.
    assert on_ranks(2, lambda rank: step_of(rank, alike=True)) == [1, 1]
    for told in on_ranks(2, lambda rank: step_of(rank, alike=False)):
        assert told.kind == "StoppedRunError"
        assert "a user could count on two ranks" in told.words


def test_behind_the_filter_no_rank_has_weights_of_a_step_that_is_not_charged() -> None:
    def moved(rank: int) -> bool:
        users = 200
        model = nn.Linear(2, 1)
        step = PrivateStep(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            Plan.sample_users(
                num_users=users,
                expected_cohort_size=users,
                group_size=1,
                steps=2,
                clip_norm=1.0,
                noise_multiplier=4.0,
                delta=1e-3,
                update=Filter(
                    concentration=0.2,
                    threshold=0.8,
                    threshold_epsilon=60.0,
                    threshold_delta=1e-4,
                ),
            ),
            UserIndex.from_owners([str(user) for user in range(users)]),
            record_loss=squared_error,
            secret=RunSecret.fixed_for_tests(3),
        )
        step.check_model({"x": torch.randn(3, 2)})
        before = model.weight.detach().clone()

        def disk_is_full() -> None:
            raise OSError

        if rank == 0:
            step.record.charge_step = disk_is_full  # type: ignore[method-assign]
        with contextlib.suppress(OSError, StoppedRunError):
            step.apply({"x": torch.ones(len(rows), 2)} for rows in step.draw())
        return not torch.equal(model.weight, before)

    assert on_ranks(2, moved) == [False, False]


def test_what_one_rank_alone_has_is_refused_by_all() -> None:
    def told(rank: int) -> None:
        Ranks.found().check_same({"plan": "a"} | ({"average": "b"} if rank else {}))

    for found in on_ranks(2, told):
        assert (found.kind, "rank 1 has another average" in found.words) == ("InputError", True)
