"""Where attention can follow records, and what is said where it cannot."""

from __future__ import annotations

import pytest
import torch
import transformers
from comparing import assert_same_as_plain, cohort, shake

import models_zoo
from userdp.clipping.gradients.following import can_follow_records
from userdp.errors import InputError


def test_attention_follows_records_where_every_weight_belongs_to_a_layer() -> None:
    model = models_zoo.build("llama")
    assert can_follow_records(model, torch.float32, captured=False, is_asked=True)
    assert can_follow_records(model, torch.bfloat16, captured=True, is_asked=True)


def test_products_in_full_precision_cannot_be_captured() -> None:
    model = models_zoo.build("llama")
    assert not can_follow_records(model, torch.float32, captured=True, is_asked=False)
    with pytest.raises(InputError, match="half precision"):
        can_follow_records(model, torch.float32, captured=True, is_asked=True)


def test_attention_with_weights_of_its_own_runs_user_by_user() -> None:
    config = transformers.DiffLlamaConfig(
        vocab_size=models_zoo.VOCABULARY,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = transformers.DiffLlamaForCausalLM(config)
    # torch would warn here that it loops over the users.
    assert_same_as_plain(shake(model.double().eval()), cohort([[5, 2], [3]]))
    assert not can_follow_records(model, torch.float32, captured=False, is_asked=False)
    with pytest.raises(InputError, match=r"block 'model\.layers\.0\.self_attn'"):
        can_follow_records(model, torch.float32, captured=False, is_asked=True)
