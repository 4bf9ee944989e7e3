"""The conformance suite of update rules, run on every registered one."""

from __future__ import annotations

import pytest
import torch
from common_rules import (
    check_every_number_is_said,
    check_frozen,
    check_json,
    check_keys,
    check_named,
    check_words,
)
from part_examples import each, without_example
from torch import Tensor, nn

import models_zoo
from userdp.losses import Batch, causal_lm_loss
from userdp.models.checks import trainable_parameters
from userdp.updates.contract import UPDATE_RULES, UpdateRule


def model_with_gradients(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Some gradients are there already: those of an optimizer step that is not done."""
    model = models_zoo.build("gpt2 tied", dtype)
    for number, parameter in enumerate(model.parameters()):
        if number % 2:
            parameter.grad = torch.ones_like(parameter)
    return model


def batch(rows: int = 3, seed: int = 0) -> Batch:
    return models_zoo.ragged_batch([6, 4, 9, 3, 5][:rows], seed=seed)


def update_of(part: UpdateRule, model: nn.Module, group: Batch) -> list[Tensor]:
    parameters = list(trainable_parameters(model).values())
    return part.of_group(model, parameters, group, record_loss=causal_lm_loss, clip=list)


def alike(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_every_registered_update_rule_has_an_example() -> None:
    assert without_example(UPDATE_RULES) == []


@each(UPDATE_RULES)
def test_an_update_leaves_the_model_and_its_gradients_as_they_are(part: UpdateRule) -> None:
    model = model_with_gradients()
    before = model_with_gradients()
    group = batch()
    given = {name: tensor.clone() for name, tensor in group.items()}
    update_of(part, model, group)
    assert model.training == before.training
    states = zip(model.state_dict().items(), before.state_dict().items(), strict=True)
    for (name, ours), (_, theirs) in states:
        assert torch.equal(ours, theirs), name
    for (name, ours), theirs in zip(model.named_parameters(), before.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name
        assert ours.requires_grad == theirs.requires_grad, name
    assert all(torch.equal(group[name], tensor) for name, tensor in given.items())


@each(UPDATE_RULES)
def test_the_same_group_gives_the_same_update_whatever_was_computed_before(
    part: UpdateRule,
) -> None:
    model = model_with_gradients()
    first = update_of(part, model, batch())
    other = update_of(part, model, batch(seed=1))
    assert alike(update_of(part, model, batch()), first)
    assert alike(update_of(part, model_with_gradients(), batch()), first)
    assert not alike(other, first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each(UPDATE_RULES)
def test_an_update_is_one_tensor_a_parameter_in_float32_or_better(
    part: UpdateRule, dtype: torch.dtype
) -> None:
    model = model_with_gradients(dtype)
    found = update_of(part, model, batch())
    parameters = list(trainable_parameters(model).values())
    assert [tensor.shape for tensor in found] == [p.shape for p in parameters]
    assert {tensor.dtype for tensor in found} == {torch.float32}
    assert not any(tensor.requires_grad for tensor in found)
    assert all(bool(tensor.isfinite().all()) for tensor in found)


@each(UPDATE_RULES)
def test_a_group_without_records_gives_zero(part: UpdateRule) -> None:
    empty = {name: tensor[:0] for name, tensor in batch().items()}
    assert not any(bool(tensor.any()) for tensor in update_of(part, model_with_gradients(), empty))


@each(UPDATE_RULES)
def test_the_update_does_not_depend_on_how_many_records_are_computed_at_once(
    part: UpdateRule,
) -> None:
    model = model_with_gradients()
    parameters = list(trainable_parameters(model).values())
    whole = update_of(part, model, batch(5))
    pieces = part.of_group(
        model, parameters, batch(5), record_loss=causal_lm_loss, clip=list, microbatch_records=2
    )
    for ours, theirs in zip(pieces, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@each(UPDATE_RULES)
def test_parameters_are_frozen_named_and_written_down(part: UpdateRule) -> None:
    check_frozen(part)
    check_json(UPDATE_RULES, part)
    check_named(UPDATE_RULES, part)
    check_keys(part)
    check_words(part)
    check_every_number_is_said(part)
    # A statement takes the mean gradient for granted, and nothing else.
    assert bool(part.words) == (not part.is_mean_gradient)
