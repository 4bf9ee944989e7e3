"""Clipping by parameter vectors: each to its own norm, and all together within the bound."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import models_zoo
from userdp import Plan
from userdp.clipping.factors import clip_factors
from userdp.clipping.layer_groups import Layers
from userdp.clipping.plain import PlainClipping, clip_update
from userdp.clipping.rules import ClipRule, FlatClip, PerLayerClip, PerVectorClip
from userdp.clipping.settings import StepSettings
from userdp.clipping.summation import summation
from userdp.errors import InputError
from userdp.losses import causal_lm_loss
from userdp.models.checks import trainable_parameters
from userdp.models.word_lstm import WordLSTM, WordLSTMConfig
from userdp.updates.estimators import ClippedDenominator, Estimator, FixedDenominator
from userdp.updates.fedavg import FedAvg
from userdp.updates.mean_gradient import MEAN_GRADIENT

GATES = ("embedding.*", "*_gate.weight", "*_gate.bias", "*")


def lstm() -> WordLSTM:
    torch.manual_seed(0)
    return WordLSTM(WordLSTMConfig(vocab_size=30, embedding_size=4, state_size=5)).eval()


def numbers(model: nn.Module, rule: ClipRule) -> list[int]:
    return Layers(model, list(trainable_parameters(model).values())).by(rule)


def test_the_papers_lstm_has_eleven_vectors_and_modules_are_six() -> None:
    assert numbers(lstm(), PerVectorClip(clip_norm=1.0)) == list(range(11))
    assert max(numbers(lstm(), PerLayerClip(clip_norm=1.0))) == 5
    assert set(numbers(lstm(), FlatClip(clip_norm=1.0))) == {0}


def test_parameters_belong_to_the_first_pattern_that_matches() -> None:
    rule = PerVectorClip(clip_norm=1.0, groups=GATES)
    assert numbers(lstm(), rule) == [0, *[1, 2] * 4, 3, 3]


@pytest.mark.parametrize("path", ["plain", "fast"])
@pytest.mark.parametrize("update", [MEAN_GRADIENT, FedAvg(local_learning_rate=50.0)], ids=str)
def test_every_vector_of_a_large_update_gets_its_own_norm(update: Any, path: str) -> None:
    model = models_zoo.build("gpt2 tied", torch.float64)
    groups = ("*wte*", "*attn*", "*")
    given = (0.004, 0.003, 0.012)
    rule = PerVectorClip(norms=given, groups=groups)
    assert rule.clip_norm == pytest.approx(0.013, rel=1e-12)
    parameters = list(trainable_parameters(model).values())
    made = summation(
        model,
        parameters,
        update,
        rule,
        record_loss=causal_lm_loss,
        settings=StepSettings(path=path),  # type: ignore[arg-type]
        sequence_length=16,
    )
    found = made.clipped_sum([models_zoo.ragged_batch([9, 4, 2], seed=1)], rule).total.views
    where = numbers(model, rule)
    for number, norm in enumerate(given):
        own = [tensor for tensor, place in zip(found, where, strict=True) if place == number]
        together = float(torch.cat([tensor.flatten() for tensor in own]).norm())
        assert together <= norm
        assert together == pytest.approx(norm, rel=1e-9)


@pytest.mark.parametrize("rule", [PerVectorClip(clip_norm=0.3), PerVectorClip(clip_norm=1e9)])
@pytest.mark.parametrize("architecture", ["gpt2 tied", "llama tied + lora", "llama", "lstm tied"])
def test_the_fast_path_clips_vectors_as_the_plain_loop_does(
    architecture: str, rule: ClipRule
) -> None:
    model = models_zoo.BUILDERS[architecture]().eval()
    parameters = list(trainable_parameters(model).values())
    groups = [
        models_zoo.ragged_batch(list(lengths), seed=seed)
        for seed, lengths in enumerate(([9, 4, 2], [6], [3, 12], [7]))
    ]
    fast = summation(
        model,
        parameters,
        MEAN_GRADIENT,
        rule,
        record_loss=causal_lm_loss,
        settings=StepSettings(),
        sequence_length=16,
    )
    plain = PlainClipping(model, parameters, record_loss=causal_lm_loss)
    wanted = torch.cat([view.flatten() for view in plain.clipped_sum(groups, rule).total.views])
    found = torch.cat([view.flatten() for view in fast.clipped_sum(groups, rule).total.views])
    assert float((found - wanted).norm()) <= 1e-5 * float(wanted.norm())


def random_update(rng: np.random.Generator) -> list[Tensor]:
    """A few tensors of very different size, often far beyond every norm, in few directions."""
    sizes = 10.0 ** rng.uniform(-2, 3, size=5)
    sign = rng.choice([-1.0, 1.0])
    return [
        torch.full((n,), sign * size / math.sqrt(n), dtype=torch.float64)
        if rng.random() < 0.7
        else torch.from_numpy(rng.standard_normal(n) * size)
        for n, size in zip((1, 2, 3, 4, 5), sizes, strict=True)
    ]


@pytest.mark.parametrize(
    "rule",
    [
        FlatClip(clip_norm=2.0),
        PerLayerClip(clip_norm=2.0),
        PerVectorClip(clip_norm=2.0),
        PerVectorClip(norms=(1.0, 0.1, 0.5, 1.5, 0.7)),
    ],
    ids=lambda rule: rule.words,
)
@pytest.mark.parametrize(
    "estimator",
    [FixedDenominator(factor=1.7), ClippedDenominator(expected_groups=8.0, least=2.0)],
    ids=["f_f", "f_c"],
)
def test_no_neighbouring_cohort_is_further_away_than_the_sensitivity(
    estimator: Estimator, rule: ClipRule
) -> None:
    rng = np.random.default_rng(8)

    def estimate(updates: Tensor, weights: Tensor) -> Tensor:
        return weights @ updates * estimator.scale(float(weights.sum()))

    pool = torch.stack([torch.cat(clip_update(random_update(rng), rule)) for _ in range(200)])
    largest = 0.0
    for _ in range(1000):
        clipped = pool[rng.integers(len(pool), size=rng.integers(1, 7))]
        weights = torch.from_numpy(rng.choice([0.2, 1.0], size=len(clipped)))
        moved = estimate(clipped, weights) - estimate(clipped[:-1], weights[:-1])
        largest = max(largest, float(moved.norm()))
    sensitivity = estimator.sensitivity(rule.bound)
    assert largest <= sensitivity * (1 + 1e-12)
    # A bound that nobody comes near would hide an error.
    assert largest >= 0.4 * sensitivity


def test_noise_is_scaled_to_all_vectors_together() -> None:
    plan = Plan.sample_users(
        num_users=100,
        expected_cohort_size=10,
        steps=5,
        delta=1e-3,
        noise_multiplier=1.5,
        clip=PerVectorClip(norms=(2.0, 3.0, 6.0)),
    )
    assert plan.noise_stddev == pytest.approx(1.5 * 7.0, rel=1e-12)
    assert "clip_norms=2, 3, 6 (together clip_norm=7)" in plan.statement().mechanism


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (PerVectorClip(norms=(1.0, 2.0)), "2 clip_norms for 11 vectors"),
        (PerVectorClip(clip_norm=1.0, groups=("embedding.*",)), "none matches 'input_gate.weight'"),
        (PerVectorClip(clip_norm=1.0, groups=("*", "x.*")), "'x.*' matches no parameter"),
    ],
)
def test_a_rule_that_does_not_fit_the_model_is_refused_before_the_first_step(
    rule: ClipRule, said: str
) -> None:
    model = lstm()
    with pytest.raises(InputError) as error:
        summation(
            model,
            list(model.parameters()),
            FedAvg(local_learning_rate=1.0),
            rule,
            record_loss=causal_lm_loss,
            settings=StepSettings(),
            sequence_length=16,
        )
    assert said in str(error.value)


class Generous(FlatClip):
    """A rule from elsewhere that gives every layer the whole bound."""

    by_layer = True

    def shares(self, count: int) -> tuple[float, ...]:
        return (1.0,) * count


def test_a_rule_whose_shares_exceed_its_bound_is_refused() -> None:
    with pytest.raises(InputError, match="whole bound"):
        clip_factors(torch.ones(3, 2), Generous(clip_norm=1.0), margin=0.0)
