"""Local training: the algorithm as printed, many users at once, and the estimators' sensitivity."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import models_zoo
from userdp import Plan, PrivateStep, UserIndex, verify
from userdp.clipping.plain import clip_update
from userdp.clipping.rules import AutomaticClip, ClipRule, FlatClip, PerLayerClip, PerVectorClip
from userdp.clipping.settings import StepSettings
from userdp.clipping.stacked.clip import StackedClip
from userdp.clipping.stacked.lora import stacked_adapters
from userdp.clipping.summation import summation
from userdp.errors import InputError, UnaccountedPlanError
from userdp.losses import Batch, causal_lm_loss
from userdp.models.adapters import Lora, add_lora
from userdp.models.checks import trainable_parameters
from userdp.updates.contract import Descent
from userdp.updates.estimators import ClippedDenominator, FixedDenominator
from userdp.updates.fedavg import FedAvg

INFINITE = FlatClip(clip_norm=math.inf)
RAGGED = ([9, 4, 2], [6], [3, 12, 5, 2], [7, 7], [4, 4, 4, 4, 4])


def groups() -> list[Batch]:
    return [models_zoo.ragged_batch(list(lengths), seed=s) for s, lengths in enumerate(RAGGED)]


def summed(
    model: nn.Module, update: FedAvg, rule: ClipRule, path: str, cohort: Sequence[Batch]
) -> tuple[Tensor, float]:
    made = summation(
        model,
        list(trainable_parameters(model).values()),
        update,
        rule,
        record_loss=causal_lm_loss,
        settings=StepSettings(path=path),  # type: ignore[arg-type]
        sequence_length=16,
    )
    found = made.clipped_sum(cohort, rule)
    # Otherwise the fast path would be compared with nothing: who cannot be stacked trains alone.
    assert path == "plain" or made.trains_many_at_once  # type: ignore[attr-defined]
    return torch.cat([view.flatten() for view in found.total.views]), found.total_weight


def local_sgd(model: nn.Module, batch: Batch, update: FedAvg) -> nn.Module:
    """Alg. 1 by torch's own optimizer, on a copy of the model and without clipping.

    After every step the algorithm forms theta^0 + (theta - theta^0).
    """
    own = copy.deepcopy(model)
    start = [parameter.detach().clone() for parameter in own.parameters()]
    optimizer = torch.optim.SGD(own.parameters(), lr=update.local_learning_rate)
    for _ in range(update.local_epochs):
        for first in range(0, len(batch["input_ids"]), update.local_batch_size):
            part = {n: t[first : first + update.local_batch_size] for n, t in batch.items()}
            optimizer.zero_grad()
            causal_lm_loss(own, part).mean().backward()
            optimizer.step()
            with torch.no_grad():
                for parameter, theta_0 in zip(own.parameters(), start, strict=True):
                    parameter.copy_(theta_0 + (parameter - theta_0))
    return own


@pytest.mark.parametrize("path", ["plain", "fast"])
def test_one_user_without_clipping_and_noise_is_local_sgd(path: str) -> None:
    update = FedAvg(local_learning_rate=0.3, local_epochs=2, local_batch_size=2)
    model = models_zoo.BUILDERS["gpt2 tied"]().eval()
    (batch,) = groups()[2:3]
    wanted = local_sgd(model, batch, update)
    # Everybody is in every step. The sum is divided by the two users that are declared, and the
    # server's rate of 2 undoes that exactly.
    plan = Plan.sample_users(
        num_users=2,
        expected_cohort_size=2,
        group_size=4,
        steps=1,
        clip_norm=math.inf,
        noise_multiplier=0.0,
        non_private=True,
        update=update,
        delta=0.1,
    )
    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=2.0),
        plan,
        UserIndex.from_owners(["ann"] * 4),
        settings=StepSettings(path=path),  # type: ignore[arg-type]
        sequence_length=16,
    )
    step.draw()
    step.apply([batch])
    for ours, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
        if path == "plain":
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_one_epoch_of_one_batch_is_the_gradient_times_the_rate() -> None:
    # UserUpdateFedSGD: ClipFn(-eta grad), with the opposite sign here.
    model = models_zoo.BUILDERS["gpt2 tied"]().eval()
    update = FedAvg(local_learning_rate=0.25, local_batch_size=8)
    rule = FlatClip(clip_norm=0.05)
    parameters = list(trainable_parameters(model).values())
    for group in groups():
        gradient = torch.autograd.grad(causal_lm_loss(model, group).mean(), parameters)
        wanted = clip_update([0.25 * tensor for tensor in gradient], rule)
        found, _ = summed(model, update, rule, "plain", [group])
        torch.testing.assert_close(
            found, torch.cat([tensor.flatten() for tensor in wanted]), rtol=1e-5, atol=1e-8
        )


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize(
    "rule",
    [
        FlatClip(clip_norm=0.3),
        PerLayerClip(clip_norm=0.3),
        PerVectorClip(norms=(0.2, 0.1), groups=("*attn*", "*")),
        INFINITE,
    ],
)
@pytest.mark.parametrize("architecture", ["gpt2 tied", "llama", "llama tied + lora"])
def test_many_users_at_once_are_the_users_one_by_one(
    architecture: str, rule: ClipRule, dtype: torch.dtype, most: float
) -> None:
    torch.manual_seed(0)
    model = models_zoo.BUILDERS[architecture]().eval().to(dtype)
    update = FedAvg(
        local_learning_rate=0.5, local_epochs=2, local_batch_size=2, user_weight_cap=3.0
    )
    one_by_one, weight = summed(model, update, rule, "plain", groups())
    at_once, same_weight = summed(model, update, rule, "fast", groups())
    assert float((at_once - one_by_one).norm()) <= most * float(one_by_one.norm())
    assert weight == pytest.approx(same_weight) == pytest.approx(1 + 1 / 3 + 1 + 2 / 3 + 1)


def test_a_frozen_factor_stays_and_the_other_is_trained_by_many_users_at_once() -> None:
    model = add_lora(models_zoo.BUILDERS["llama"](), Lora(rank=2, freeze_a=True)).eval()
    update = FedAvg(local_learning_rate=0.5, local_batch_size=2)
    rule = FlatClip(clip_norm=0.3)
    before = {name: p.clone() for name, p in model.named_parameters()}
    one_by_one, _ = summed(model, update, rule, "plain", groups())
    at_once, _ = summed(model, update, rule, "fast", groups())
    assert float(one_by_one.norm()) > 0
    assert float((at_once - one_by_one).norm()) <= 1e-5 * float(one_by_one.norm())
    assert len(one_by_one) < sum(p.numel() for n, p in model.named_parameters() if "lora" in n)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_adapters_under_dropout_are_not_stacked() -> None:
    # Side by side, users would share a stream of random numbers.
    model = models_zoo.BUILDERS["llama tied + lora"]().eval()
    parameters = list(trainable_parameters(model).values())
    descent = Descent(rate=0.5, penalty=0.0)
    assert stacked_adapters(model, parameters, descent) is not None
    model.add_module("drop", nn.Dropout(0.1))
    assert stacked_adapters(model, parameters, descent) is None
    assert stacked_adapters(model.eval(), parameters, descent) is not None


@pytest.mark.parametrize("path", ["plain", "fast"])
def test_the_way_is_clipped_after_every_local_step(path: str) -> None:
    model = models_zoo.BUILDERS["gpt2 tied"]().eval()
    rule = FlatClip(clip_norm=0.01)
    update = FedAvg(local_learning_rate=5.0, local_batch_size=1)
    (group,) = groups()[4:5]
    seen: list[float] = []
    start = [p.detach().clone() for p in model.parameters()]

    def watching(own: nn.Module, batch: Batch) -> Tensor:
        gaps = [(p.detach() - s).norm() for p, s in zip(own.parameters(), start, strict=True)]
        seen.append(float(torch.stack(gaps).norm()))
        return causal_lm_loss(own, batch)

    if path == "plain":
        summation(
            model,
            list(model.parameters()),
            update,
            rule,
            record_loss=watching,
            settings=StepSettings(path="plain"),
            sequence_length=16,
        ).clipped_sum([group], rule)
        assert len(seen) == 5
        assert seen[0] == 0
        assert all(0.0099 < norm <= 0.01 * (1 + 1e-4) for norm in seen[1:])
    else:
        found, _ = summed(model, update, rule, "fast", [group])
        assert float(found.norm()) <= 0.01


@pytest.mark.parametrize("path", ["plain", "fast"])
def test_one_users_bad_numbers_change_nobody_else(path: str) -> None:
    model = models_zoo.BUILDERS["gpt2 tied"]().eval()
    update = FedAvg(local_learning_rate=0.5, local_batch_size=2)
    rule = FlatClip(clip_norm=0.3)

    def loss(own: nn.Module, batch: Batch) -> Tensor:
        return causal_lm_loss(own, batch) * batch["factor"]

    def total(cohort: list[Batch]) -> Tensor:
        found = summation(
            model,
            list(model.parameters()),
            update,
            rule,
            record_loss=loss,
            settings=StepSettings(path=path),  # type: ignore[arg-type]
            sequence_length=16,
        ).clipped_sum(cohort, rule)
        return torch.cat([view.flatten() for view in found.total.views])

    def with_factor(group: Batch, factor: float) -> Batch:
        return {**group, "factor": torch.full((len(group["labels"]),), factor)}

    good = [with_factor(group, 1.0) for group in groups()]
    for factor in (math.nan, math.inf, 1e30):
        bad = with_factor(groups()[1], factor)
        moved = total([bad, *good]) - total(good)
        assert float(moved.norm()) <= 0.3 * (1 + 1e-5)
        if not math.isfinite(factor):
            assert float(moved.norm()) <= 1e-5


def test_on_a_processor_users_of_a_large_model_train_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = models_zoo.BUILDERS["gpt2 tied"]().eval()
    update = FedAvg(local_learning_rate=0.5, local_batch_size=2)

    def is_stacked() -> bool:
        made = summation(
            model,
            list(model.parameters()),
            update,
            INFINITE,
            record_loss=causal_lm_loss,
            settings=StepSettings(),
            sequence_length=16,
        )
        return made.trains_many_at_once  # type: ignore[attr-defined]

    assert is_stacked()
    monkeypatch.setattr("userdp.clipping.local._LARGEST_ON_CPU", 1000)
    assert not is_stacked()


def test_torch_s_own_lstm_trains_one_user_at_a_time() -> None:
    model = models_zoo.BUILDERS["lstm tied"]()
    made = summation(
        model,
        list(model.parameters()),
        FedAvg(local_learning_rate=0.5, local_batch_size=2),
        INFINITE,
        record_loss=causal_lm_loss,
        settings=StepSettings(),
        sequence_length=16,
    )
    assert not made.trains_many_at_once  # type: ignore[attr-defined]
    found = made.clipped_sum(groups(), INFINITE).total.values
    alone, _ = summed(
        model, FedAvg(local_learning_rate=0.5, local_batch_size=2), INFINITE, "plain", groups()
    )
    assert float(found.norm()) == pytest.approx(float(alone.norm()), rel=1e-6)


@pytest.mark.parametrize("architecture", ["gpt2 tied", "lstm tied"])
def test_the_probes_pass(architecture: str) -> None:
    model = models_zoo.BUILDERS[architecture]()
    example = models_zoo.ragged_batch([6, 4], seed=0)
    found = verify(
        model.eval(),
        example,
        sequence_length=12,
        update=FedAvg(local_learning_rate=0.5, local_batch_size=1, user_weight_cap=3.0),
        clip=FlatClip(clip_norm=0.5),
    )
    assert found.cause == ""
    assert found.largest_movement <= 1 + 1e-5
    assert {probe.name.split(":")[0] for probe in found.probes} == {"fast", "plain"}


# ---- estimators


def cohort_of(rng: np.random.Generator, users: int, bound: float) -> tuple[Tensor, Tensor]:
    """Updates of norm at most `bound`, many of them at it and in few directions; and weights."""
    directions = torch.from_numpy(rng.standard_normal((users, 3)))
    directions[: users // 2] = directions[:1]
    size = bound * torch.from_numpy(np.where(rng.random(users) < 0.7, 1.0, rng.random(users)))
    updates = directions / directions.norm(dim=1, keepdim=True) * size[:, None]
    weights = torch.from_numpy(np.where(rng.random(users) < 0.3, 1.0, rng.random(users)))
    return updates, weights


def estimate(estimator: object, updates: Tensor, weights: Tensor) -> Tensor:
    return weights @ updates * estimator.scale(float(weights.sum()))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "estimator",
    [FixedDenominator(factor=1.7), ClippedDenominator(expected_groups=8.0, least=2.0)],
    ids=["f_f", "f_c"],
)
def test_no_user_moves_an_estimate_beyond_its_sensitivity(estimator: object) -> None:
    rng = np.random.default_rng(3)
    largest = 0.0
    for _ in range(1000):
        users = int(rng.integers(1, 9))
        updates, weights = cohort_of(rng, users, bound=2.0)
        moved = estimate(estimator, updates, weights) - estimate(
            estimator, updates[:-1], weights[:-1]
        )
        largest = max(largest, float(moved.norm()))
    bound = estimator.sensitivity(2.0)  # type: ignore[attr-defined]
    assert largest <= bound * (1 + 1e-12)
    # The bound is no more than twice what random users reach.
    assert largest >= 0.5 * bound


@pytest.mark.parametrize(
    "rule",
    [
        FlatClip(clip_norm=2.0),
        PerLayerClip(clip_norm=2.0),
        PerVectorClip(norms=(1.5, 0.5), groups=("*.weight", "*.bias")),
    ],
    ids=["flat", "per layer", "per vector"],
)
@pytest.mark.parametrize(
    "estimator",
    [FixedDenominator(factor=1.7), ClippedDenominator(expected_groups=8.0, least=2.0)],
    ids=["f_f", "f_c"],
)
def test_no_user_moves_an_estimate_of_clipped_updates_beyond_its_sensitivity(
    estimator: object, rule: ClipRule
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double()
    parameters = list(model.parameters())
    clip = StackedClip(model, parameters)
    clip.use(rule)
    rng = np.random.default_rng(4)
    largest = 0.0
    for _ in range(1000):
        users = int(rng.integers(1, 9))
        # Some far beyond the bound, some within, most of them in one direction.
        sizes = torch.from_numpy(rng.choice([0.1, 10.0, 1e4], size=users))
        drawn = [torch.from_numpy(rng.standard_normal((users, *p.shape))) for p in parameters]
        for tensor in drawn:
            tensor[: users // 2] = tensor[:1]
            tensor[-1] = -tensor[0] if users > 1 else tensor[0]
            tensor.mul_(sizes.view(-1, *[1] * (tensor.dim() - 1)))
        clipped, _ = clip.clipped(drawn, rule)
        updates = torch.cat([tensor.flatten(1) for tensor in clipped], dim=1)
        _, weights = cohort_of(rng, users, bound=1.0)
        moved = estimate(estimator, updates, weights) - estimate(
            estimator, updates[:-1], weights[:-1]
        )
        largest = max(largest, float(moved.norm()))
    bound = estimator.sensitivity(rule.bound)  # type: ignore[attr-defined]
    assert largest <= bound * (1 + 1e-12)
    assert largest >= 0.5 * bound


def test_lemma_1_as_printed_is_false_for_f_c() -> None:
    # Only ||w D|| <= S is asked for there. 17 users of weight 1/17 with D = 17 S, and one more.
    estimator = ClippedDenominator(expected_groups=1.0, least=1.0)
    updates = torch.tensor([[17.0]] * 17 + [[-1.0]], dtype=torch.float64)
    weights = torch.tensor([1 / 17] * 17 + [1.0], dtype=torch.float64)
    assert float((weights[:, None] * updates).abs().max()) <= 1 + 1e-12
    moved = estimate(estimator, updates, weights) - estimate(estimator, updates[:-1], weights[:-1])
    assert float(moved.abs()) == pytest.approx(9.0)
    assert estimator.sensitivity(1.0) == 2.0


def fedavg_plan(update: FedAvg, **chosen: object) -> Plan:
    return Plan.sample_users(
        num_users=100,
        expected_cohort_size=10,
        group_size=4,
        steps=5,
        delta=1e-3,
        update=update,
        **({"clip_norm": 2.0, "noise_multiplier": 1.5} | chosen),  # type: ignore[arg-type]
    )


def test_noise_is_scaled_to_the_estimators_sensitivity() -> None:
    fixed = fedavg_plan(FedAvg(local_learning_rate=1.0, user_weight_cap=8.0, total_weight=50.0))
    # z S / (q W) on the average; the sum's noise is the divisor times that.
    assert fixed.noise_stddev / fixed.divisor == pytest.approx(1.5 * 2.0 / (0.1 * 50))
    clipped = fedavg_plan(FedAvg(local_learning_rate=1.0, estimator="f_c", min_weight=80.0))
    assert clipped.noise_stddev / clipped.divisor == pytest.approx(2 * 1.5 * 2.0 / (0.1 * 80))
    assert fixed.epsilon() == clipped.epsilon()


def test_the_true_average_and_rules_that_are_no_projection_are_refused() -> None:
    with pytest.raises(UnaccountedPlanError, match="true average"):
        fedavg_plan(FedAvg(local_learning_rate=1.0, estimator="f"))
    with pytest.raises(InputError, match="local step"):
        fedavg_plan(FedAvg(local_learning_rate=1.0), clip_norm=None, clip=AutomaticClip())


@pytest.mark.parametrize(
    "wrong",
    [
        {"local_epochs": 0},
        {"local_batch_size": 2.5},
        {"local_learning_rate": math.nan},
        {"user_weight_cap": 0.0},
        {"estimator": "mean"},
        {"estimator": "f_c"},
        {"min_weight": 3.0},
        {"update_penalty": -1.0},
    ],
)
def test_numbers_that_mean_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError):
        FedAvg(**({"local_learning_rate": 1.0} | wrong))  # type: ignore[arg-type]


def test_nobody_weighs_more_than_one() -> None:
    with pytest.raises(InputError, match="total_weight"):
        fedavg_plan(FedAvg(local_learning_rate=1.0, total_weight=101.0))
