"""Wrong per-user gradients that real libraries had, each against the plain loop."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import pytest
import torch
from comparing import (
    assert_same_as_plain,
    cohort,
    norms,
    pairs_wherever_possible,
    shake,
    trainable,
)
from torch import Tensor, nn

import models_zoo
from userdp.clipping.batches.equal import pack_equal
from userdp.clipping.execute.execution import Execution
from userdp.clipping.gradients.many_users import ManyUsers
from userdp.clipping.rules import FlatClip
from userdp.losses import RecordLoss, causal_lm_loss
from userdp.updates.mean_gradient import mean_gradient

FORMS = {"stored": contextlib.nullcontext, "pairs": pairs_wherever_possible}
USERS = [[9, 4], [9, 9], [9, 2], [9, 6]]


def fast_norms(
    model: nn.Module, groups: Sequence[dict[str, Tensor]], loss: RecordLoss = causal_lm_loss
) -> list[float]:
    """Each user's norm as the fast path finds it."""
    (users,) = pack_equal(groups, max_tokens=10_000, ladder=False)
    many_users = ManyUsers(
        model,
        trainable(model),
        FlatClip(clip_norm=1.0),
        users,
        execution=Execution(record_loss=loss),
    )
    return many_users(users, [torch.zeros_like(p) for p in trainable(model)]).tolist()


@pytest.mark.parametrize("forms", FORMS)
def test_opacus_413_both_uses_of_a_tied_weight_add_up_before_the_norm(forms: str) -> None:
    model = shake(models_zoo.build("gpt2 tied"))
    groups = cohort(USERS)
    expected = norms(model, groups)
    with FORMS[forms]():
        assert fast_norms(model, groups) == pytest.approx(expected, rel=1e-10)
        assert_same_as_plain(model, groups)
    # The uses apart, as in a model whose head has a weight of its own, give another norm.
    untied = shake(models_zoo.build("gpt2 untied"))
    weights = model.state_dict()
    untied.load_state_dict({n: weights[n] for n in untied.state_dict()})
    apart = norms(untied, groups)
    assert max(abs(a / b - 1) for a, b in zip(apart, expected, strict=True)) > 1e-3


@pytest.mark.parametrize("forms", FORMS)
def test_opacus_841_position_ids_shared_by_all_rows_belong_to_each_user(forms: str) -> None:
    model = shake(models_zoo.build("gpt2 tied"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("wpe" in name)
    groups = cohort(USERS)
    with FORMS[forms]():
        assert fast_norms(model, groups) == pytest.approx(norms(model, groups), rel=1e-10)
        assert_same_as_plain(model, groups)


class Biased(nn.Module):
    """Zero inputs: all that a record can move is the bias, by all its tokens together."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models_zoo.VOCABULARY, 4).requires_grad_(False)
        self.head = nn.Linear(4, models_zoo.VOCABULARY)
        nn.init.zeros_(self.embedding.weight)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids))


@pytest.mark.parametrize("forms", FORMS)
def test_opacus_751_norm_of_a_bias_is_that_of_its_sum_over_tokens(forms: str) -> None:
    torch.manual_seed(0)
    model = Biased().double()
    groups = cohort(USERS)
    expected = norms(model, groups)
    with FORMS[forms]():
        assert fast_norms(model, groups) == pytest.approx(expected, rel=1e-10)
        assert_same_as_plain(model, groups)
    # Tokens' squared norms added up, the wrong way, would be something else.
    (bias,) = mean_gradient(model, [model.head.bias], groups[0])
    assert expected[0] == pytest.approx(float(bias.norm()), rel=1e-10)


@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize("name", ["gpt2 + lora", "llama tied + lora"])
def test_opacus_820_adapters_get_their_own_gradients_and_the_base_none(
    name: str, forms: str
) -> None:
    model = shake(models_zoo.build(name))
    groups = cohort(USERS)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    expected = norms(model, groups)
    with FORMS[forms]():
        assert fast_norms(model, groups) == pytest.approx(expected, rel=1e-10)
        assert_same_as_plain(model, groups)
    assert all(math.isfinite(norm) and norm > 0 for norm in expected)
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], tensor) for name, tensor in frozen.items())
    assert all(parameter.grad is None for parameter in model.parameters())
