"""Gradients of half-precision models in float32, a layer at a time."""

from __future__ import annotations

import copy

import pytest
import torch
from comparing import cohort, shake, trainable

import models_zoo
from userdp.clipping.checks.wide_reference import wide_gradient
from userdp.losses import causal_lm_loss
from userdp.updates.mean_gradient import mean_gradient


@pytest.mark.parametrize(
    "name", ["gpt2 tied", "llama", "llama tied + lora", "lstm tied", "gemma", "used twice"]
)
def test_gradient_is_that_of_the_model_in_float32(name: str) -> None:
    narrow = shake(models_zoo.build(name, torch.bfloat16))
    wide = copy.deepcopy(narrow).float()
    (group,) = cohort([[9, 4]])
    expected = mean_gradient(wide, trainable(wide), group)
    before = {n: p.clone() for n, p in narrow.named_parameters()}
    found = wide_gradient(narrow, trainable(narrow), group, record_loss=causal_lm_loss)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    # The bfloat16 gradient is another: the comparison could have failed.
    rounded = mean_gradient(narrow, trainable(narrow), group)
    worst = max(float((a - b).abs().max()) for a, b in zip(rounded, expected, strict=True))
    assert worst > 1e-4
    after = dict(narrow.named_parameters())
    assert all(
        type(p) is torch.nn.Parameter and torch.equal(p, before[n]) for n, p in after.items()
    )
    assert all(p.dtype == torch.bfloat16 for p in after.values())


def test_a_pass_that_fails_leaves_the_weights_as_they_were() -> None:
    model = models_zoo.build("gpt2 tied", torch.bfloat16)
    group = {"input_ids": torch.tensor([[999]]), "labels": torch.tensor([[1]])}
    with pytest.raises(IndexError):
        wide_gradient(model, trainable(model), group, record_loss=causal_lm_loss)
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
