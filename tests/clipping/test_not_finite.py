"""A user whose gradient is not finite adds nothing, and nobody else notices."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from comparing import (
    cohort,
    difference,
    fast_sum,
    pairs_wherever_possible,
    plain_sum,
    shake,
    trainable,
)
from torch import Tensor, nn

import models_zoo
from userdp.clipping.fast import FastClipping
from userdp.clipping.rules import AutomaticClip, ClipRule, FlatClip, PerLayerClip
from userdp.clipping.settings import StepSettings
from userdp.losses import Batch, causal_lm_loss

FORMS = {"stored": contextlib.nullcontext, "pairs": pairs_wherever_possible}
# No user but the poisoned one has this token.
POISON = models_zoo.VOCABULARY - 1
LENGTHS = [[5, 7], [5, 7], [5, 7], [5, 7], [6], [5, 7]]


def poisoned_cohort(users: list[int]) -> list[dict[str, Tensor]]:
    groups = cohort(LENGTHS)
    for number, group in enumerate(groups):
        group["input_ids"] = group["input_ids"] % POISON
        if number in users:
            group["input_ids"][0, 1] = POISON
        # Nobody is asked to predict it: the head must stay finite for the others.
        group["labels"] = torch.where(group["labels"] == POISON, 1, group["labels"])
    return groups


def loss_with_poison(value: float):  # type: ignore[no-untyped-def]
    """The usual loss; multiplied by `value` for records that have the token."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        usual = causal_lm_loss(model, batch)
        has_it = (batch["input_ids"] == POISON).any(1)
        return usual * torch.where(has_it, value, 1.0)

    return loss


@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["gpt2 tied", "llama + lora", "lstm", "own parameter"])
def test_user_with_a_loss_that_is_not_finite_adds_exactly_nothing(
    name: str, value: float, forms: str
) -> None:
    name = {"llama + lora": "llama tied + lora"}.get(name, name)
    model = shake(models_zoo.build(name, torch.float32))
    rule = FlatClip(clip_norm=0.5)
    groups = poisoned_cohort([2, 4])
    with FORMS[forms]():
        found = fast_sum(model, groups, rule, loss_with_poison(value))
    others = [group for user, group in enumerate(groups) if user not in (2, 4)]
    assert difference(found, plain_sum(model, others, rule)) <= 1e-5


@pytest.mark.parametrize("rule", [PerLayerClip(clip_norm=0.5), AutomaticClip()], ids=str)
def test_user_is_left_out_of_every_layer_if_one_layer_is_not_finite(rule: ClipRule) -> None:
    model = shake(models_zoo.build("llama", torch.float32))
    with torch.no_grad():
        trainable(model)[0][POISON] = math.nan
    groups = poisoned_cohort([1])
    found = fast_sum(model, groups, rule)
    assert difference(found, plain_sum(model, groups[:1] + groups[2:], rule)) <= 1e-5


@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_others_sum_is_bit_for_bit_what_it_is_with_a_silent_user(forms: str, bad: float) -> None:
    # An embedding that only one user reads is broken; before, that user's records have no label.
    model = shake(models_zoo.build("llama", torch.float32))
    rule = FlatClip(clip_norm=0.5)
    groups = poisoned_cohort([2])
    silent = [dict(group) for group in groups]
    silent[2]["labels"] = torch.full_like(silent[2]["labels"], -100)
    with FORMS[forms]():
        expected = [t.clone() for t in fast_sum(model, silent, rule)]
        with torch.no_grad():
            trainable(model)[0][POISON] = bad
        found = fast_sum(model, groups, rule)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("tokens", [4, 12, 1000])
def test_user_alone_or_in_pieces_that_is_not_finite_adds_nothing(tokens: int) -> None:
    model = shake(models_zoo.build("llama", torch.float32))
    with torch.no_grad():
        trainable(model)[0][POISON] = math.nan
    rule = FlatClip(clip_norm=0.5)
    groups = poisoned_cohort([0])
    settings = StepSettings(microbatch_tokens=tokens)
    assert all(not t.any() for t in fast_sum(model, groups[:1], rule, settings=settings))
    found = fast_sum(model, groups, rule, settings=settings)
    assert difference(found, plain_sum(model, groups[1:], rule)) <= 1e-5


def test_user_that_is_not_finite_is_not_counted_as_within() -> None:
    model = shake(models_zoo.build("llama", torch.float32))
    with torch.no_grad():
        trainable(model)[0][POISON] = math.nan
    rule = FlatClip(clip_norm=1e6)
    fast = FastClipping(model, trainable(model), rule, record_loss=causal_lm_loss)
    assert int(fast.clipped_sum(poisoned_cohort([1, 3]), rule).num_within) == len(LENGTHS) - 2


def test_user_whose_squared_norm_overflows_float32_adds_nothing() -> None:
    # A norm of 1e25 is finite and its square is not: such a user is left out, the others count.
    model = shake(models_zoo.build("gpt2 tied", torch.float32))
    rule = FlatClip(clip_norm=0.5)
    groups = poisoned_cohort([2])
    found = fast_sum(model, groups, rule, loss_with_poison(1e25), StepSettings(check=False))
    assert difference(found, plain_sum(model, groups[:2] + groups[3:], rule)) <= 1e-5
