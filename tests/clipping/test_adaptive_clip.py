"""The adaptive clip norm: finds its quantile, pays for what it releases, and says so."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from comparing import RAGGED, cohort, middle_clip, shake
from torch import Tensor, nn

import models_zoo
import userdp.step
from userdp.accounting.quantile import adaptive_clipping_noise
from userdp.clipping.rules import AdaptiveClip
from userdp.clipping.settings import StepSettings
from userdp.errors import InputError
from userdp.index import UserIndex
from userdp.losses import Batch
from userdp.plan import Plan
from userdp.step import PrivateStep
from userdp.streams import RunSecret

SEED = RunSecret.fixed_for_tests(3)
USERS = 40
# User u's gradient is one direction of length (u + 1) / 40, whatever the weights are.
NORMS = torch.arange(1, USERS + 1) / USERS


def linear_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"])[:, 0]


def plan_of(clip: AdaptiveClip, **changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "num_users": USERS,
        "expected_cohort_size": USERS,
        "group_size": 1,
        "steps": 1,
        "noise_multiplier": 1e-3,
        "delta": 1e-3,
    }
    return Plan.sample_users(clip=clip, **(settings | changes))


def make_step(plan: Plan, *, width: int = 3, index: UserIndex | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(width, 1, bias=False)
    return PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        plan,
        index or UserIndex.from_owners(range(USERS)),
        record_loss=linear_loss,
        secret=SEED,
        **options,
    )


def run(step: PrivateStep, norms: Tensor = NORMS, width: int = 3) -> list[float]:
    """The clip norm after every step."""
    x = torch.zeros(len(norms), width)
    x[:, 0] = norms
    found: list[float] = []
    for groups in step.cohorts():
        step.apply([{"x": x[list(rows)]} for rows in groups])
        found.append(step.clip_norm)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("first", [0.05, 5.0])
@pytest.mark.parametrize("target", [0.2, 0.9])
def test_clip_norm_converges_to_the_quantile_of_the_norms(target: float, first: float) -> None:
    rule = AdaptiveClip(clip_norm=first, count_noise=1e-2, target_quantile=target)
    after = run(make_step(plan_of(rule, steps=250)))
    # Norms are 1/40 apart, and one step changes the clip norm by a few percent at most.
    assert float((after[-1] >= NORMS).double().mean()) == pytest.approx(
        target, abs=1 / USERS + 1e-6
    )


def test_noise_on_the_sum_is_larger_by_the_price_of_the_count() -> None:
    width, count_noise = 100_000, 0.6
    rule = AdaptiveClip(clip_norm=2.0, count_noise=count_noise)
    plan = plan_of(rule, noise_multiplier=1.0)
    expected = 1 / math.sqrt(1 - 1 / (2 * count_noise) ** 2)
    assert plan.noise_stddev == pytest.approx(2.0 * expected)
    step = make_step(plan, width=width)
    before = step.model.weight.detach().clone()
    run(step, torch.zeros(USERS), width)
    noise = (step.model.weight.detach() - before) * plan.divisor
    # Fixed seed; the standard error is 0.2%, so 1% fails by chance once in a million seeds.
    assert float(noise.std()) == pytest.approx(2.0 * expected, rel=0.01)


def test_noise_follows_the_clip_norm_of_its_own_step() -> None:
    rule = AdaptiveClip(clip_norm=1.0, count_noise=5.0)
    plan = plan_of(rule, noise_multiplier=1.0)
    multiplier = adaptive_clipping_noise(noise_multiplier=1.0, count_noise=5.0)
    later = rule.following(0.9)
    assert later.clip_norm < 1.0
    assert plan.noise_stddev_of(later) == pytest.approx(later.clip_norm * multiplier)


def test_fast_and_plain_clipping_adapt_alike() -> None:
    found: list[list[float]] = []
    for clipping in ("fast", "plain"):
        model = shake(models_zoo.build("gpt2 tied"))
        groups = cohort(RAGGED)
        rule = AdaptiveClip(clip_norm=middle_clip(model, groups), count_noise=0.5)
        plan = plan_of(
            rule, num_users=len(RAGGED), expected_cohort_size=len(RAGGED), group_size=5, steps=8
        )
        step = PrivateStep(
            model,
            torch.optim.SGD(model.parameters(), lr=0.3),
            plan,
            UserIndex.from_owners(range(len(RAGGED))),
            settings=StepSettings(path=clipping),  # type: ignore[arg-type]
            secret=SEED,
        )
        norms: list[float] = []
        for drawn in step.cohorts():
            step.apply([groups[int(rows[0])] for rows in drawn])
            norms.append(step.clip_norm)
        found.append(norms)
    assert found[0] == found[1]
    assert len(set(found[0])) == 8


# ---- what the count tells about one user


def released_count(monkeypatch: pytest.MonkeyPatch, groups: list[Batch], clipping: str) -> float:
    """The number that the noise is added to, for a cohort of these groups at clip norm 1/2."""
    seen: list[float] = []

    def spy(value: float, **_: Any) -> float:
        seen.append(value)
        return value

    monkeypatch.setattr(userdp.step, "noisy_number", spy)
    index = UserIndex.from_owner_numbers(np.arange(len(groups)), num_users=len(groups))
    rule = AdaptiveClip(clip_norm=0.5, count_noise=1.0)
    plan = plan_of(rule, num_users=len(groups), expected_cohort_size=len(groups))
    step = make_step(plan, index=index, settings=StepSettings(path=clipping))
    step.draw()
    step.apply(groups)
    (value,) = seen
    return value


def one_record(norm: float) -> dict[str, Tensor]:
    return {"x": torch.tensor([[norm, 0.0, 0.0]])}


NO_RECORD = {"x": torch.zeros(0, 3)}
KINDS = {"clipped": one_record(0.9), "within": one_record(0.1), "not finite": one_record(math.nan)}


@pytest.mark.parametrize("clipping", ["fast", "plain"])
@pytest.mark.parametrize("kind", KINDS)
def test_adding_or_silencing_a_user_moves_the_released_count_by_half(
    kind: str, clipping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[Batch] = [one_record(norm) for norm in (0.2, 0.4, 0.6, 0.8, 1.0)]
    without = released_count(monkeypatch, others, clipping)
    present = released_count(monkeypatch, [*others, KINDS[kind]], clipping)
    silent = released_count(monkeypatch, [*others, NO_RECORD], clipping)
    assert abs(present - without) == 0.5
    # zero-out: the user is drawn and its records count as nothing, here as in the sum.
    assert abs(present - silent) == 0.5


# ---- what is said about it


def test_statement_and_ledger_name_the_adaptive_rule() -> None:
    rule = AdaptiveClip(clip_norm=0.7, count_noise=4.0, target_quantile=0.25)
    step = make_step(plan_of(rule, noise_multiplier=1.0))
    run(step)
    mechanism = step.statement().mechanism
    for word in ("clip_norm=0.7 at first", "0.25 quantile", "noise 4", "paid for in every step"):
        assert word in mechanism
    written = step.plan.to_json()["clip"]
    assert written["type"] == "AdaptiveClip"
    assert float(written["count_noise"]) == 4.0
    # The count is in the step's price: as if the sum alone were released with less noise.
    fixed = Plan.sample_users(
        num_users=USERS,
        expected_cohort_size=USERS,
        group_size=1,
        steps=1,
        clip_norm=0.7,
        noise_multiplier=1.0,
        delta=1e-3,
    )
    assert step.statement().epsilon == fixed.statement().epsilon


@pytest.mark.parametrize("count_noise", [0.1, 0.5])
def test_count_noise_that_leaves_nothing_for_the_updates_is_refused_by_the_plan(
    count_noise: float,
) -> None:
    with pytest.raises(InputError, match="count_noise"):
        plan_of(AdaptiveClip(clip_norm=1.0, count_noise=count_noise), noise_multiplier=1.0)


def test_an_epsilon_is_met_or_the_error_says_what_to_change() -> None:
    rule = AdaptiveClip(clip_norm=1.0, count_noise=2.0)
    plan = plan_of(rule, noise_multiplier=None, epsilon=4.0, steps=3)
    assert 3.99 < plan.epsilon() <= 4.0
    needed = plan_of(
        AdaptiveClip(clip_norm=1.0, count_noise=1e3), noise_multiplier=None, epsilon=0.1, steps=3
    ).noise.noise_multiplier
    with pytest.raises(InputError) as refused:
        plan_of(rule, noise_multiplier=None, epsilon=0.1, steps=3)
    told = str(refused.value)
    assert f"noise_multiplier={needed:.6g}" in told
    for word in ("count_noise=2", "clip_count_noise", "larger epsilon"):
        assert word in told


def test_adaptive_rule_without_noise_trains_and_promises_nothing() -> None:
    rule = AdaptiveClip(clip_norm=3.0, count_noise=1e-6)
    plan = plan_of(rule, noise_multiplier=0.0, non_private=True, steps=3)
    assert plan.noise_stddev == 0.0
    assert run(make_step(plan))[-1] < 3.0


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_norm": math.inf, "count_noise": 1.0},
        {"clip_norm": 0.0, "count_noise": 1.0},
        {"clip_norm": 1.0, "count_noise": 0.0},
        {"clip_norm": 1.0, "count_noise": math.nan},
        {"clip_norm": 1.0, "count_noise": 1.0, "target_quantile": 0.0},
        {"clip_norm": 1.0, "count_noise": 1.0, "target_quantile": 1.0},
        {"clip_norm": 1.0, "count_noise": 1.0, "learning_rate": 0.0},
    ],
    ids=str,
)
def test_adaptive_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(InputError):
        AdaptiveClip(**settings)


def test_clip_norm_shrinks_when_too_few_are_clipped():
    rule = AdaptiveClip(clip_norm=1.0, count_noise=5.0, target_quantile=0.5)
    assert rule.following(noisy_share_within=0.9).clip_norm < 1.0
    assert rule.following(noisy_share_within=0.1).clip_norm > 1.0
