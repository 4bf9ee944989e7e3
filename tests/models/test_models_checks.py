"""What of a model is trained, and what an optimizer may hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import families
import models_zoo
from userdp.errors import InputError, MixedExamplesError
from userdp.models.checks import (
    BufferGuard,
    check_optimizer,
    input_embedding,
    refuse_mixing,
    trainable_parameters,
)
from userdp.models.load import check_vocabulary


@pytest.mark.parametrize("architecture", models_zoo.BUILDERS)
def test_zoo_passes_the_checks(architecture: str) -> None:
    model = models_zoo.build(architecture)
    refuse_mixing(model)
    found = trainable_parameters(model)
    assert {id(p) for p in found.values()} == {id(p) for p in model.parameters() if p.requires_grad}
    check_optimizer(torch.optim.SGD(found.values(), lr=0.1), list(found.values()))


def test_a_dense_model_whose_settings_have_a_number_of_experts_passes() -> None:
    model: Any = families._family("Doge", num_key_value_heads=2)
    assert model.config.num_experts > 1
    refuse_mixing(model)

    class Own(type(model)):
        """Nobody knows how somebody else's class names its experts."""

    model.__class__ = Own
    with pytest.raises(MixedExamplesError, match="mixture of experts"):
        refuse_mixing(model)


def test_a_model_without_a_table_of_tokens_takes_any_tokenizer() -> None:
    config = transformers.CanineConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = transformers.CanineForSequenceClassification(config)
    assert input_embedding(model) is None
    check_vocabulary(model, models_zoo.word_tokenizer())
    assert input_embedding(models_zoo.build("llama")).num_embeddings == models_zoo.VOCABULARY


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


@pytest.mark.parametrize("name", families.MIXTURES)
def test_mixture_of_experts_is_refused(name: str) -> None:
    with pytest.raises(MixedExamplesError, match="mixture of experts"):
        refuse_mixing(families.build(families.MIXTURES[name]))


def test_mixture_of_experts_in_a_nested_configuration_is_refused() -> None:
    # By its settings alone, whatever its layers are called.
    model: Any = nn.Linear(2, 2)
    model.config = families.build(families.MIXTURES["dbrx"]).config
    with pytest.raises(MixedExamplesError, match="moe_num_experts=4"):
        refuse_mixing(model)


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8, torch.complex64])
@pytest.mark.parametrize("size", [0, 1, 7, 1025])
def test_a_write_through_data_to_a_buffer_of_any_dtype_is_noticed(
    dtype: torch.dtype, size: int
) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("kept", torch.zeros(size, size).to(dtype))
    guard = BufferGuard(model)
    assert guard.changed() == []
    model.kept.data[:1] = torch.ones(size).to(dtype)  # type: ignore[index]
    assert guard.changed() == (["kept"] if size else [])


def test_a_scalar_buffer_is_watched() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("kept", torch.tensor(1.0))
    guard = BufferGuard(model)
    model.kept.data.fill_(2.0)  # type: ignore[operator]
    with pytest.raises(MixedExamplesError, match="'kept' is written"):
        guard.check()
