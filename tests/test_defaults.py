"""What is chosen for whoever chooses nothing, and the reasons given for it."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
from torch import nn

import models_zoo
from userdp import Plan, defaults
from userdp.clipping.rules import AutomaticClip
from userdp.errors import InputError
from userdp.optimizers.by_name import default_rate, make_optimizer


@pytest.mark.parametrize("num_users", [2, 10, 32, 100, 999, 5000, 763_430, 10**8])
def test_delta_is_just_below_the_rule_and_below_one_in_all_users(num_users: int) -> None:
    found = defaults.delta(num_users)
    rule = num_users**-1.1
    assert rule / 2 < found <= rule
    assert found < 1 / num_users
    assert len(f"{found:e}".split("e")[0].rstrip("0").rstrip(".")) == 1


def test_a_plan_needs_the_users_and_epsilon_alone() -> None:
    plan = Plan.sample_users(num_users=5000, epsilon=8.0)
    assert plan.epsilon() <= 8.0
    assert (plan.steps, plan.divisor, plan.delta) == (500, 250.0, 8e-5)
    assert plan.clip == AutomaticClip()
    with pytest.raises(InputError, match="at least one other"):
        Plan.sample_users(num_users=1, epsilon=8.0)
    with pytest.raises(InputError, match="at most one of clip_norm and clip"):
        Plan.sample_users(num_users=50, epsilon=8.0, clip_norm=1.0, clip=AutomaticClip())


@pytest.mark.parametrize("num_users", [2, 31, 640, 20_480, 10**7])
def test_cohort_is_a_twentieth_within_its_bounds(num_users: int) -> None:
    found = defaults.expected_cohort_size(num_users)
    assert 1 <= found <= min(num_users, 1024)
    assert found == num_users / 20 or found in (num_users, 32, 1024)
    assert defaults.expected_cohort_size(num_users, 0.0) == 0.0


def gaussian_multiplier(epsilon: float, delta: float) -> float:
    """The noise of one look at all users, by bisection of Balle and Wang 2018, Thm. 8."""
    phi = NormalDist().cdf
    low, high = 1e-3, 1e3
    for _ in range(200):
        s = math.sqrt(low * high)
        found = phi(0.5 / s - epsilon * s) - math.exp(epsilon) * phi(-0.5 / s - epsilon * s)
        low, high = (s, high) if found > delta else (low, s)
    return high


@pytest.mark.parametrize(("epsilon", "largest"), [(1.0, 1.04), (8.0, 1.5)])
def test_default_cohort_and_steps_leave_little_noise_to_save(
    epsilon: float, largest: float
) -> None:
    # Steps of everybody, however many, add up to one look at everybody: nothing has less noise.
    plan = Plan.sample_users(num_users=5000, epsilon=epsilon)
    of_run = plan.noise.noise_multiplier / (plan.divisor * math.sqrt(plan.steps))
    least = gaussian_multiplier(epsilon, plan.delta) / 5000
    assert 1 <= of_run / least < largest


def test_learning_rate_follows_the_shape_of_the_model_alone() -> None:
    full, adapted = models_zoo.gpt2(), models_zoo.build("gpt2 + lora")
    width = full.config.hidden_size
    assert default_rate(full, "adamw") == defaults.learning_rate(adapters=False, width=width)
    assert default_rate(adapted, "adamw") == defaults.learning_rate(adapters=True, width=width)
    rates = [defaults.learning_rate(adapters=False, width=width) for width in (96, 768, 4096)]
    assert rates == sorted(rates, reverse=True)
    optimizer = make_optimizer(full, "adamw")
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["lr"] == default_rate(full, "adamw")


@pytest.mark.parametrize(("model", "name"), [(nn.Linear(2, 2), "adamw"), (None, "sgd")])
def test_without_evidence_there_is_no_default_rate(model: nn.Module | None, name: str) -> None:
    with pytest.raises(InputError, match="learning_rate is missing"):
        make_optimizer(model or models_zoo.gpt2(), name)
