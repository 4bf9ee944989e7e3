"""What of a model is trained, and what an optimizer may hold."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import models_zoo
from userdp.errors import InputError
from userdp.models.checks import check_optimizer, refuse_mixing, trainable_parameters


@pytest.mark.parametrize("architecture", models_zoo.BUILDERS)
def test_zoo_passes_the_checks(architecture: str) -> None:
    model = models_zoo.build(architecture)
    refuse_mixing(model)
    found = trainable_parameters(model)
    assert {id(p) for p in found.values()} == {id(p) for p in model.parameters() if p.requires_grad}
    check_optimizer(torch.optim.SGD(found.values(), lr=0.1), list(found.values()))


def test_tied_weight_counts_once() -> None:
    model = models_zoo.build("gpt2 tied")
    names = trainable_parameters(model)
    assert "transformer.wte.weight" in names
    assert "lm_head.weight" not in names
    assert len({p.data_ptr() for p in names.values()}) == len(names)


def test_lora_trains_the_adapters_alone() -> None:
    names = trainable_parameters(models_zoo.build("gpt2 + lora"))
    assert names
    assert all("lora_" in name for name in names)


def test_model_without_trainable_parameter_is_refused() -> None:
    model = models_zoo.build("gpt2 tied").requires_grad_(False)
    with pytest.raises(InputError, match="no trainable parameter"):
        trainable_parameters(model)


@pytest.mark.parametrize("layer", [nn.LayerNorm(3), nn.GroupNorm(1, 3), nn.InstanceNorm1d(3)])
def test_normalisation_within_a_record_is_allowed(layer: nn.Module) -> None:
    refuse_mixing(nn.Sequential(nn.Linear(3, 3), layer))
