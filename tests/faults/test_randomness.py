"""Whose randomness is whose: every draw of a run comes from its secret, and none is used twice.

Seen from outside, through the public step. Statistical tests fix their seed and state how often
they would fail with another.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from userdp.clipping.rules import AdaptiveClip, ClipRule
from userdp.clipping.settings import StepSettings
from userdp.index import UserIndex
from userdp.losses import Batch
from userdp.plan import Plan
from userdp.step import PrivateStep
from userdp.streams import RunSecret, Streams

USERS = 40
ROWS_EACH = 20


def linear_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The gradient of a record is its input, whatever the weights are."""
    return model(batch["x"])[:, 0]


def users_plan(**changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "num_users": USERS,
        "expected_cohort_size": USERS / 2,
        "group_size": 2,
        "steps": 3,
        "noise_multiplier": 1.0,
        "delta": 1e-3,
    }
    settings |= changes
    return Plan.sample_users(**({"clip_norm": 1.0} if "clip" not in settings else {}), **settings)


def records_plan() -> Plan:
    # Rate 1: a cohort is all the rows that are kept.
    return Plan.sample_records(
        num_users=USERS,
        expected_batch_size=2 * USERS,
        group_size=2,
        steps=3,
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-3,
    )


def make(
    plan: Plan, *, seed: int = 1, rows_each: int = ROWS_EACH, width: int = 3, **options: Any
) -> PrivateStep:
    owners = np.repeat(np.arange(USERS), rows_each).tolist()
    options = {"index": UserIndex.from_owners(owners)} | options
    model = nn.Linear(width, 1, bias=False)
    nn.init.zeros_(model.weight)
    return PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        plan,
        record_loss=linear_loss,
        secret=RunSecret.fixed_for_tests(seed),
        **options,
    )


def run(step: PrivateStep, row: Tensor) -> list[list[int]]:
    """Take every step on records that are all `row`; the rows drawn at each."""
    drawn: list[list[int]] = []
    for cohort in step.cohorts():
        drawn.append(cohort.rows.tolist())
        step.apply({"x": row.expand(len(rows), -1)} for rows in cohort)
    return drawn


# ---- where randomness comes from


@pytest.mark.parametrize("plan", [users_plan(), records_plan()], ids=["users", "records"])
def test_who_takes_part_depends_on_the_secret(plan: Plan) -> None:
    # Users: 40 fair coins and 20 choices of 2 rows of 20 at each step. Records: 2 of 20 rows kept
    # for each of 40 users. Two secrets agree by chance with probability below 1e-12.
    first, again, other = (run(make(plan, seed=seed), torch.zeros(3)) for seed in (1, 1, 2))
    assert first == again
    for ours, theirs in zip(first, other, strict=True):
        assert sorted(ours) != sorted(theirs)


def test_cohorts_differ_from_step_to_step() -> None:
    first, second, third = run(make(users_plan()), torch.zeros(3))
    assert first != second
    assert second != third
    assert first != third


def test_rows_kept_by_record_sampling_are_the_same_at_every_step() -> None:
    # Chosen once: were they chosen anew, a user could bring more than `group_size` rows in all.
    first, second, third = run(make(records_plan()), torch.zeros(3))
    assert sorted(first) == sorted(second) == sorted(third)
    assert len(first) == 2 * USERS


@pytest.mark.parametrize("unit", ["users", "records", "users, adaptive clipping"])
def test_no_two_draws_of_a_run_share_a_stream(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The streams' own keys are looked at: the cohort, the noise and the noise on the count of any
    # two steps must have been keyed differently.
    keys: list[bytes] = []
    honest = Streams.key

    def noted(self: Streams, step: int, piece: int = 0) -> bytes:
        keys.append(honest(self, step, piece))
        return keys[-1]

    monkeypatch.setattr(Streams, "key", noted)
    adaptive = unit == "users, adaptive clipping"
    clip: dict[str, ClipRule] = {"clip": AdaptiveClip(clip_norm=1.0, count_noise=2.0)}
    plan = records_plan() if unit == "records" else users_plan(**(clip if adaptive else {}))
    run(make(plan), torch.ones(3))
    assert len(set(keys)) == len(keys)
    # For the rows that record sampling keeps, then at each step for the cohort, the noise, and the
    # count's.
    assert len(keys) >= (unit == "records") + plan.steps * (3 if adaptive else 2)


def test_no_draw_comes_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("randomness that is not keyed by the run's secret")

    step = make(users_plan(clip=AdaptiveClip(clip_norm=1.0, count_noise=2.0)))
    # The probe makes rows up from a fixed seed; nothing of it is released.
    step.check_model({"x": torch.zeros(1, 3)})
    for name in ("default_rng", "random", "normal", "standard_normal", "choice", "permutation"):
        monkeypatch.setattr(np.random, name, refuse)
    for name in ("randn", "rand", "normal", "randperm", "bernoulli", "randn_like"):
        monkeypatch.setattr(torch, name, refuse)
    assert len(run(step, torch.ones(3))) == 3


# ---- the noise on adaptive clipping's count


def count_noises(step: PrivateStep, *, users: int, steps: int) -> np.ndarray:
    """What was added to the count at each step, solved for from the clip norms alone.

    All updates are zero, so all of the users are within the clip norm: the centred count is half of
    them. The divisor is the plan's.
    """
    rule = step.plan.clip
    assert isinstance(rule, AdaptiveClip)
    norms = [step.clip_norm]
    for cohort in step.cohorts():
        step.apply({"x": torch.zeros(len(rows), 3)} for rows in cohort)
        norms.append(step.clip_norm)
    assert len(norms) == steps + 1
    share = rule.target_quantile - np.diff(np.log(norms)) / rule.learning_rate
    return (share - 0.5) * step.plan.divisor - users / 2


@pytest.mark.statistical
def test_count_of_adaptive_clipping_has_fresh_noise_of_the_stated_size() -> None:
    # 400 steps, seed 1. Mean and deviation within 5 standard errors: failure 1e-6 for a fresh
    # seed. Ten fewer users than planned: dividing by how many came would move the mean by a third
    # of their half.
    steps, users, count_noise = 400, USERS - 10, 2.0
    plan = users_plan(
        expected_cohort_size=USERS,
        steps=steps,
        clip=AdaptiveClip(clip_norm=1.0, count_noise=count_noise, learning_rate=1e-3),
    )
    step = make(plan, index=UserIndex.from_owners(range(users)))
    noise = count_noises(step, users=users, steps=steps)
    assert len(np.unique(np.round(noise, 6))) > 0.99 * steps
    assert abs(noise.mean()) < 5 * count_noise / math.sqrt(steps)
    assert noise.std() == pytest.approx(count_noise, rel=5 / math.sqrt(2 * steps))
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 5 / math.sqrt(steps)


@pytest.mark.statistical
def test_noise_on_the_sum_grows_with_an_adaptive_clip_norm() -> None:
    # Everybody is clipped, so the norm rises by 10% a step. All but one of 4,000 coordinates are
    # noise alone: deviations within 5 standard errors, failure 6e-7 each for a fresh seed; seed 1.
    width, steps = 4000, 15
    plan = users_plan(
        expected_cohort_size=USERS,
        steps=steps,
        clip=AdaptiveClip(clip_norm=1.0, count_noise=1.0),
    )
    step = make(plan, rows_each=1, width=width)
    row = torch.zeros(width)
    row[0] = 1e6
    multiplier = 1 / math.sqrt(1 - 1 / (2 * 1.0) ** 2)
    weight = step.model.weight
    for cohort in step.cohorts():
        before, clip_norm = weight.detach().clone(), step.clip_norm
        step.apply({"x": row[None]} for _ in cohort)
        noise = (weight.detach() - before)[0, 1:] * plan.divisor
        expected = multiplier * clip_norm
        assert float(noise.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * width))
    assert step.clip_norm > 3.0


# ---- one group, one clipping


def movement(plan: Plan, *, clipping: str) -> float:
    """How far one user of four records, all far outside the clip norm, moves the sum."""
    step = make(
        plan, index=UserIndex.from_owners(["ann"] * 4), settings=StepSettings(path=clipping)
    )  # type: ignore[arg-type]
    cohort = step.draw()
    step.apply({"x": torch.tensor([[1e6, 0.0, 0.0]]).expand(len(rows), -1)} for rows in cohort)
    return float(step.model.weight.detach().norm()) * plan.divisor


@pytest.mark.parametrize("clipping", ["fast", "plain"])
def test_user_with_many_records_is_clipped_once(clipping: str) -> None:
    # Were each record a group of its own, the user would move the sum by four clip norms.
    plan = users_plan(
        expected_cohort_size=USERS,
        group_size=4,
        steps=1,
        noise_multiplier=0.0,
        non_private=True,
    )
    assert movement(plan, clipping=clipping) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("clipping", ["fast", "plain"])
def test_user_of_record_sampling_moves_the_sum_by_as_many_clip_norms_as_are_priced(
    clipping: str,
) -> None:
    plan = Plan.sample_records(
        num_users=USERS,
        expected_batch_size=3 * USERS,
        group_size=3,
        steps=1,
        clip_norm=1.0,
        noise_multiplier=0.0,
        non_private=True,
        delta=1e-3,
    )
    assert movement(plan, clipping=clipping) == pytest.approx(3.0, rel=1e-5)


# ---- a step without anybody


def test_empty_cohort_is_charged_and_noised() -> None:
    step = make(users_plan(steps=1), index=UserIndex.from_owners([]))
    assert len(step.draw()) == 0
    step.apply([])
    assert step.ledger.steps == 1
    assert bool((step.model.weight.detach() != 0).all())
