"""Layers that compute their weights: refused by name on the fast path, trained on the plain one."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import nn

import models_zoo
from userdp.clipping.checks.computed import refuse_computed_weights
from userdp.clipping.fast import FastClipping
from userdp.clipping.rules import FlatClip
from userdp.errors import InputError
from userdp.losses import causal_lm_loss
from userdp.probe.verify import verify

LENGTH = 8


def dora() -> nn.Module:
    settings = peft.LoraConfig(
        r=2, use_dora=True, target_modules=["q_proj"], task_type="CAUSAL_LM", lora_dropout=0.0
    )
    return peft.get_peft_model(models_zoo.build("llama"), settings).eval()  # type: ignore[arg-type]


def _on_q_proj(change: Any) -> nn.Module:
    model = models_zoo.build("llama")
    for name, module in list(model.named_modules()):
        if name.endswith("q_proj"):
            change(module)
    return model.eval()


def weight_norm() -> nn.Module:
    return _on_q_proj(nn.utils.parametrizations.weight_norm)


def spectral_norm() -> nn.Module:
    return _on_q_proj(nn.utils.parametrizations.spectral_norm)


def old_spectral_norm() -> nn.Module:
    return _on_q_proj(nn.utils.spectral_norm)


NAMES = {
    dora: "DoRA",
    weight_norm: "parametrization WeightNorm",
    spectral_norm: "parametrization SpectralNorm",
    old_spectral_norm: "SpectralNorm",
}


@pytest.mark.parametrize("make", NAMES)
def test_a_computed_weight_is_refused_by_name_on_the_fast_path(make: Any) -> None:
    model = make()
    trained = [p for p in model.parameters() if p.requires_grad]
    with pytest.raises(InputError, match=NAMES[make]) as refused:
        FastClipping(model, trained, FlatClip(clip_norm=1.0), record_loss=causal_lm_loss)
    assert "q_proj" in str(refused.value)
    assert 'path="plain"' in str(refused.value)
    # The probe says the same.
    assert NAMES[make] in verify(model, sequence_length=LENGTH, path="fast").cause


@pytest.mark.slow
@pytest.mark.parametrize("make", [dora, weight_norm])
def test_a_computed_weight_is_trained_on_the_plain_path(make: Any) -> None:
    found = verify(make(), sequence_length=LENGTH, path="plain")
    assert found.safe
    assert 0 < found.largest_movement <= 1 + 1e-5


@pytest.mark.parametrize("make", [weight_norm, old_spectral_norm])
def test_a_frozen_computed_weight_is_not_looked_at(make: Any) -> None:
    refuse_computed_weights(make().requires_grad_(False))


def test_own_weights_are_not_refused() -> None:
    for name in ("llama", "gpt2 + lora"):
        refuse_computed_weights(models_zoo.build(name))


@pytest.mark.parametrize("path", ["fast", "plain"])
def test_prompt_tuning_is_refused_in_our_words(path: Any) -> None:
    settings = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = peft.get_peft_model(
        models_zoo.build("llama", torch.float32),  # type: ignore[arg-type]
        settings,
    ).eval()
    cause = verify(model, sequence_length=LENGTH, path=path).cause
    assert f"predicts {LENGTH + 3} tokens for rows of {LENGTH}" in cause
    assert "Prompt tuning" in cause
    assert "LoRA" in cause
