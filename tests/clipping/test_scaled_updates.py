"""Gradients scaled before they are clipped: fast and plain, written out by hand, and bounded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comparing import (
    RAGGED,
    cohort,
    difference,
    norms,
    pairs_wherever_possible,
    shake,
    squares_wherever_possible,
    trainable,
)
from torch import Tensor, nn

import models_zoo
from userdp.clipping.fast import FastClipping
from userdp.clipping.gradients.probes import Probes
from userdp.clipping.layer_groups import Layers
from userdp.clipping.plain import PlainClipping
from userdp.clipping.rules import AutomaticClip, ClipRule, FlatClip, PerLayerClip
from userdp.clipping.settings import StepSettings
from userdp.losses import causal_lm_loss
from userdp.updates.mean_gradient import mean_gradient
from userdp.updates.scaled_gradient import Scale, ScaledGradient, Scales

# Each has another way to hand out gradients: Conv1D, ties, adapters, tables, a layer of no rule.
MODELS = ["gpt2 tied", "llama", "llama tied and trained + lora", "lstm tied", "own parameter"]
OTHERS = [n for n in models_zoo.BUILDERS | models_zoo.MORE_BUILDERS if n not in MODELS]


def made_up(parameters: Sequence[nn.Parameter], kind: str, *, seed: int = 3) -> ScaledGradient:
    """Scales from 1/8 to 8, each coordinate by itself or by row and column."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return 8 ** (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1)

    scales = [
        Scale((drawn(len(p), 1), drawn(1, p.shape[1])))
        if kind == "by row and column" and p.dim() == 2
        else Scale((drawn(*p.shape),))
        for p in parameters
    ]
    return ScaledGradient(by=Scales(tuple(parameters), tuple(scales)))


def sums(
    model: nn.Module,
    update: ScaledGradient,
    rule: ClipRule,
    name: str = "gpt2 tied",
    **settings: Any,
) -> list[Any]:
    """The same cohort by the fast path and by the plain loop."""
    groups = cohort(RAGGED, masked=name in models_zoo.MASKED)
    loss = models_zoo.loss_of(name)
    parameters = trainable(model)
    fast = FastClipping(
        model,
        parameters,
        rule,
        record_loss=loss,
        settings=StepSettings(join_records=False, **settings),
        update=update,
    )
    plain = PlainClipping(model, parameters, record_loss=loss, update=update)
    return [way.clipped_sum(groups, rule).total.views for way in (fast, plain)]


@pytest.mark.parametrize(
    ("kind", "pairs"),
    [("each", False), ("by row and column", False), ("by row and column", True)],
)
@pytest.mark.parametrize(
    "name", [*MODELS, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_fast_and_plain_give_the_same_sum(name: str, kind: str, pairs: bool) -> None:
    model = shake(models_zoo.build(name))
    update = made_up(trainable(model), kind)
    with pairs_wherever_possible() if pairs else nullcontext():
        for mix in (False, True):
            fast, plain = sums(model, update, FlatClip(clip_norm=3.0), name, mix_sizes=mix)
            assert difference(fast, plain) <= 1e-9


def test_norms_that_come_with_products_are_not_those_of_scaled_gradients() -> None:
    model = shake(models_zoo.build("gpt2 untied"))
    update = made_up(trainable(model), "by row and column")
    with squares_wherever_possible():
        fast, plain = sums(model, update, FlatClip(clip_norm=3.0))
    assert difference(fast, plain) <= 1e-9


def test_scales_of_each_coordinate_never_use_pairs() -> None:
    """A pair has no place for a number of each weight; on a GPU it would be cheaper here."""
    weight: Any = SimpleNamespace(is_cuda=True, shape=(768, 768))
    layer: Any = SimpleNamespace(parameters={"weight": weight}, module=nn.Linear(1, 1))
    for kind, expected in (("each", False), ("by row and column", True)):
        factors = (torch.ones(2, 2),) if kind == "each" else (torch.ones(2, 1), torch.ones(1, 2))
        scale = Scale(factors)
        asking: Any = SimpleNamespace(
            _scales=SimpleNamespace(of=lambda _, own=scale: own),
            _execution=SimpleNamespace(chunk_logits=False),
            _called={layer.module: None},
            _used_once=lambda _: True,
            _product_dtype=lambda _: torch.bfloat16,
            _typical_tokens=lambda _: 32,
            _outputs_of_input=lambda _: [768],
        )
        assert Probes._prefers_pair(asking, layer) is expected


@pytest.mark.parametrize(
    "rule", [FlatClip(clip_norm=2.0), PerLayerClip(clip_norm=2.0), AutomaticClip()]
)
def test_each_user_is_scaled_and_then_clipped(rule: ClipRule) -> None:
    """Against the definition, written out: s g, its norms, its factors, the sum."""
    model = shake(models_zoo.build("gpt2 tied"))
    parameters, groups = trainable(model), cohort(RAGGED)
    update = made_up(parameters, "by row and column")
    expected = [torch.zeros_like(p) for p in parameters]
    for group in groups:
        if not len(group["input_ids"]):
            continue
        gradient = mean_gradient(model, parameters, group)
        own = [g * s.factors[0] for g, s in zip(gradient, update.by.scales, strict=True)]
        own = [
            g if len(s.factors) == 1 else g * s.factors[1]
            for g, s in zip(own, update.by.scales, strict=True)
        ]
        if isinstance(rule, PerLayerClip):
            numbers = Layers(model, parameters).by(rule)
        else:
            numbers = [0] * len(own)
        count = max(numbers) + 1
        squares = [
            sum(float(t.square().sum()) for t, n in zip(own, numbers, strict=True) if n == layer)
            for layer in range(count)
        ]
        for total, tensor, number in zip(expected, own, numbers, strict=True):
            norm, bound = squares[number] ** 0.5, 2.0 / count**0.5
            factor = (
                1 / (norm + 0.01)
                if isinstance(rule, AutomaticClip)
                else min(1, bound / max(norm, 1e-30))
            )
            total += tensor * factor
    for found in sums(model, update, rule):
        assert difference(found, expected) <= 1e-6


def test_one_user_moves_the_scaled_sum_by_the_clip_norm_at_most() -> None:
    model = shake(models_zoo.build("llama tied"))
    parameters, groups = trainable(model), cohort(RAGGED)
    update = made_up(parameters, "each")
    rule = FlatClip(clip_norm=0.1 * max(norms(model, groups)))
    for path in (
        FastClipping(model, parameters, rule, record_loss=causal_lm_loss, update=update),
        PlainClipping(model, parameters, record_loss=causal_lm_loss, update=update),
    ):
        whole = [t.clone() for t in path.clipped_sum(groups, rule).total.views]
        for left_out in range(len(groups)):
            rest = groups[:left_out] + groups[left_out + 1 :]
            without = path.clipped_sum(rest, rule).total.views
            moved = sum(
                float((a - b).double().square().sum()) for a, b in zip(whole, without, strict=True)
            )
            assert moved**0.5 <= rule.clip_norm * (1 + 1e-5)


def test_scales_that_change_in_place_reach_the_next_sum() -> None:
    model = shake(models_zoo.build("gpt2 tied"))
    parameters, groups = trainable(model), cohort(RAGGED)
    update = made_up(parameters, "by row and column")
    rule = FlatClip(clip_norm=1.0)
    fast = FastClipping(model, parameters, rule, record_loss=causal_lm_loss, update=update)
    before = [t.clone() for t in fast.clipped_sum(groups, rule).total.views]
    other = made_up(parameters, "by row and column", seed=4)
    for scale, values in zip(update.by.scales, other.by.scales, strict=True):
        for factor, value in zip(scale.factors, values.factors, strict=True):
            factor.copy_(value)
    found = fast.clipped_sum(groups, rule).total.views
    plain = PlainClipping(model, parameters, record_loss=causal_lm_loss, update=other)
    assert difference(found, plain.clipped_sum(groups, rule).total.views) <= 1e-5
    assert difference(found, before) > 0.1


def test_a_user_larger_than_a_batch_is_scaled_once() -> None:
    model = shake(models_zoo.build("gpt2 tied"))
    update = made_up(trainable(model), "by row and column")
    fast, plain = sums(model, update, FlatClip(clip_norm=1.0), microbatch_tokens=8)
    assert difference(fast, plain) <= 1e-9


def test_scales_of_a_trial_are_made_up_and_then_put_back() -> None:
    update = made_up(trainable(models_zoo.build("gpt2 tied")), "each")
    before = [factor.clone() for scale in update.by.scales for factor in scale.factors]
    with update.by.tried():
        inside = [factor.clone() for scale in update.by.scales for factor in scale.factors]
    after = [factor for scale in update.by.scales for factor in scale.factors]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(before, inside, strict=True))
    spread = torch.cat([values.flatten() for values in inside])
    assert 0.25 <= float(spread.min()) < 0.5
    assert 2 < float(spread.max()) <= 4
