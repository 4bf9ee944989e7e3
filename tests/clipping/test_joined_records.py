"""Several records of a user in one row: none sees another, and the sum is the plain loop's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
import transformers
from comparing import (
    RAGGED,
    assert_same_as_plain,
    cohort,
    difference,
    middle_clip,
    pairs_wherever_possible,
    plain_sum,
    shake,
    trainable,
)
from hypothesis import strategies as st
from torch import Tensor, nn

import models_zoo
from userdp.clipping.batches.joined_records import (
    can_join,
    is_joined,
    joined,
    separated,
)
from userdp.clipping.batches.users import Users
from userdp.clipping.execute.record_attention import RECORD_ATTENTION, attention_named
from userdp.clipping.fast import FastClipping
from userdp.clipping.rules import FlatClip, PerLayerClip
from userdp.clipping.settings import StepSettings
from userdp.errors import InputError
from userdp.losses import (
    IGNORED_LABEL,
    JOINED_LEFT,
    JOINED_POSITION,
    JOINED_WEIGHT,
    Batch,
    causal_lm_loss,
    joined_lm_loss,
    masked_lm_loss,
    record_layout,
)

JOINED = StepSettings(join_records=True)
# Those of the zoo that can be told which tokens are one record.
CAN_JOIN = [
    "gpt2 tied",
    "gpt2 untied",
    "llama",
    "llama tied",
    "gpt2 + lora",
    "llama tied + lora",
    "llama tied and trained + lora",
    "qwen2",
    "qwen3 tied",
    "mistral",
    "gemma",
    "gpt-neox",
    "phi",
]
FORMS = {"stored": contextlib.nullcontext, "pairs": pairs_wherever_possible}


def records_of(group: dict[str, Tensor]) -> list[list[int]]:
    """The labelled tokens of each record, first tokens apart: they are not predicted."""
    return sorted(
        [token for token in row[1:].tolist() if token != IGNORED_LABEL] for row in group["labels"]
    )


@hypothesis.given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), row=st.integers(1, 70)
)
def test_every_record_is_there_once_and_comes_out_as_it_went_in(
    lengths: list[int], row: int
) -> None:
    (group,) = cohort([lengths])
    found = joined(group, row)
    apart = separated(found)
    assert records_of(apart) == records_of(group)
    assert apart["input_ids"].shape[1] == max(lengths)
    assert found["input_ids"].shape == (-(-sum(lengths) // row), row)
    assert int((found[JOINED_LEFT] >= 0).sum()) == sum(lengths)


def test_tokens_weigh_what_they_weigh_in_rows_of_their_own() -> None:
    (group,) = cohort([[5, 3, 9, 2]])
    found = joined(group, 12)
    rows = len(found["input_ids"])
    line = {name: tensor.flatten() for name, tensor in found.items()}
    record = ((line[JOINED_POSITION] == 0) & (line[JOINED_LEFT] >= 0)).cumsum(0)
    labelled = line["labels"] != IGNORED_LABEL
    by_record = torch.zeros(5, dtype=torch.float64)
    by_record.index_add_(0, record[labelled], line[JOINED_WEIGHT][labelled])
    assert torch.allclose(by_record[1:], torch.tensor(rows / 4, dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("name", CAN_JOIN)
@pytest.mark.parametrize("forms", FORMS)
def test_joined_sum_is_the_plain_loops(name: str, forms: str) -> None:
    model = shake(models_zoo.build(name))
    assert can_join(model, causal_lm_loss, 16)
    # Gemma's norms are computed in float32, and rounded as its rows lie.
    tolerance = 1e-8 if name == "gemma" else 1e-10
    with FORMS[forms]():
        assert_same_as_plain(model, cohort(RAGGED), settings=JOINED, tolerance=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("tokens", [10, 40, 400])
def test_joined_users_of_every_size_sum_up_as_in_the_plain_loop(mixed: bool, tokens: int) -> None:
    # With ten tokens a batch, most users are larger than a batch and come in pieces.
    model = shake(models_zoo.build("gpt2 tied"))
    settings = StepSettings(join_records=True, mix_sizes=mixed, microbatch_tokens=tokens)
    assert_same_as_plain(model, cohort(RAGGED), settings=settings)
    rule = PerLayerClip(clip_norm=0.3)
    assert_same_as_plain(model, cohort(RAGGED, seed=1), settings=settings, rule=rule)


@pytest.mark.slow
@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
    lengths=st.lists(
        st.lists(st.integers(1, 14), min_size=1, max_size=6), min_size=2, max_size=8
    ).filter(lambda users: sum(max(records) > 1 for records in users) >= 2),
    seed=st.integers(0, 99),
)
def test_random_cohorts_joined_are_the_plain_loops(lengths: list[list[int]], seed: int) -> None:
    model = shake(models_zoo.build("llama tied"))
    groups = cohort(lengths, seed=seed)
    assert_same_as_plain(model, groups, settings=JOINED, rule=FlatClip(clip_norm=0.5))


def test_labels_in_the_middle_alone_count_and_what_follows_them_is_dropped() -> None:
    model = shake(models_zoo.build("gpt2 tied"))
    groups = cohort([[9, 4, 4], [8, 8], [6]])
    groups[0]["labels"][0, 5:] = IGNORED_LABEL
    groups[1]["labels"][1, :4] = IGNORED_LABEL
    groups[1]["labels"][0, :] = IGNORED_LABEL
    assert_same_as_plain(model, groups, settings=JOINED)


def tokens_run(fast: FastClipping, groups: list[dict[str, Tensor]], rule: FlatClip) -> list[Users]:
    """The batches that the fast path makes of the groups."""
    seen: list[Users] = []
    honest = fast._add_users

    def noted(users: Users, make: Any) -> None:
        seen.append(users)
        honest(users, make)

    fast._add_users = noted  # type: ignore[method-assign]
    fast.clipped_sum(groups, rule)
    fast._add_users = honest  # type: ignore[method-assign]
    return seen


def clipping_of(name: str, settings: StepSettings | None = None) -> FastClipping:
    model = models_zoo.build(name)
    loss = models_zoo.loss_of(name)
    rule = FlatClip(clip_norm=0.5)
    return FastClipping(model, trainable(model), rule, record_loss=loss, settings=settings)


def test_short_records_beside_a_long_one_take_far_fewer_tokens() -> None:
    groups = cohort([[14, 3, 2, 4, 3, 2], [2, 2, 13], [3, 3, 3, 12, 2]])
    rule = FlatClip(clip_norm=0.5)
    batches = {
        choice: tokens_run(clipping_of("llama", StepSettings(join_records=choice)), groups, rule)
        for choice in (None, False)
    }
    tokens = {
        choice: sum(users.batch["input_ids"].numel() for users in found)
        for choice, found in batches.items()
    }
    assert all(is_joined(users.batch) for users in batches[None])
    assert not any(is_joined(users.batch) for users in batches[False])
    assert tokens[None] < 0.5 * tokens[False]


@pytest.mark.parametrize("name", ["bert", "lstm", "own parameter", "used twice"])
def test_models_that_cannot_keep_records_apart_are_run_as_before(name: str) -> None:
    groups = cohort([[14, 2, 2, 2], [2, 13, 3]], masked=name in models_zoo.MASKED)
    fast = clipping_of(name)
    batches = tokens_run(fast, groups, FlatClip(clip_norm=0.5))
    assert not any(is_joined(users.batch) for users in batches)
    with pytest.raises(InputError, match="does not keep records apart"):
        clipping_of(name, JOINED)


def test_a_model_that_leaves_the_mask_or_the_positions_out_is_found_out() -> None:
    model: Any = models_zoo.build("gpt2 tied", torch.float32)
    honest = model.forward
    assert can_join(model, causal_lm_loss, 16)

    def without_mask(input_ids, position_ids=None, attention_mask=None, **rest):  # type: ignore[no-untyped-def]
        own = attention_mask
        if own is not None:
            # As if all tokens were one record.
            place = torch.arange(input_ids.numel()).view(input_ids.shape)
            left = input_ids.numel() - 1 - place
            own = record_layout({JOINED_POSITION: place, JOINED_LEFT: left})
        return honest(input_ids=input_ids, position_ids=position_ids, attention_mask=own, **rest)

    def without_positions(input_ids, position_ids=None, attention_mask=None, **rest):  # type: ignore[no-untyped-def]
        return honest(input_ids=input_ids, attention_mask=attention_mask, **rest)

    for dishonest in (without_mask, without_positions):
        model.forward = dishonest
        assert not can_join(model, causal_lm_loss, 16)


def test_other_losses_are_not_joined() -> None:
    model = models_zoo.build("llama")
    assert not can_join(model, masked_lm_loss, 16)
    assert not can_join(model, lambda model, batch: causal_lm_loss(model, batch), 16)


def test_no_record_sees_another() -> None:
    # Other tokens in the first record leave the losses of the second as they are. Each reaches from
    # one row into the next.
    model = shake(models_zoo.build("gpt2 tied"))
    (group,) = cohort([[6, 5]])
    found = joined(group, 4)
    assert len(found["input_ids"]) == 3
    first = torch.arange(12).view(3, 4) < 6
    only_second = found | {JOINED_WEIGHT: torch.where(first, 0.0, found[JOINED_WEIGHT])}
    ids = torch.where(first, (found["input_ids"] + 3) % models_zoo.VOCABULARY, found["input_ids"])
    with torch.no_grad(), attention_named(model, RECORD_ATTENTION):
        before = joined_lm_loss(model, only_second)
        after = joined_lm_loss(model, only_second | {"input_ids": ids})
    assert float(before.sum()) > 0
    assert torch.allclose(before, after, rtol=1e-13, atol=0)
    assert middle_clip(model, cohort([[6, 5], [3]])) > 0


TINY = {
    "vocab_size": models_zoo.VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.0],
    "long_factor": [3.0, 3.0],
    "original_max_position_embeddings": 20,
}
DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
# Tokens meet where no mask is looked at, or a position's angle depends on how many there are.
CANNOT_JOIN: dict[str, Callable[[], nn.Module]] = {
    "convolutions": lambda: transformers.Lfm2ForCausalLM(
        transformers.Lfm2Config(**TINY, layer_types=["conv", "full_attention"])
    ),
    "linear attention": lambda: transformers.MiniMaxForCausalLM(
        transformers.MiniMaxConfig(
            **TINY,
            head_dim=4,
            num_local_experts=2,
            block_size=8,
            layer_types=["linear_attention", "full_attention"],
        )
    ),
    "long rotations": lambda: transformers.Phi3ForCausalLM(
        transformers.Phi3Config(**TINY, original_max_position_embeddings=20, rope_scaling=LONG_ROPE)
    ),
    "dynamic rotations": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**TINY, rope_scaling=DYNAMIC_ROPE)
    ),
    "windows": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**TINY, sliding_window=8)
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CANNOT_JOIN)
def test_models_in_which_records_would_meet_are_not_joined(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = CANNOT_JOIN[name]().to(dtype).eval()
    assert not can_join(model, causal_lm_loss, 32)


def test_whether_records_are_joined_follows_from_their_declared_length() -> None:
    torch.manual_seed(0)
    config = transformers.MistralConfig(**TINY, sliding_window=16)
    model = shake(transformers.MistralForCausalLM(config).double().eval())
    rule = FlatClip(clip_norm=0.5)
    short, long = cohort([[14, 2, 2, 2], [2, 13, 3]]), cohort([[30, 2, 2, 2]])
    # Without a declared length they could be as long as the model has positions: beyond the window.
    for declared, short_ones_are in ((None, False), (32, False), (16, True)):
        fast = FastClipping(
            model,
            trainable(model),
            rule,
            record_loss=causal_lm_loss,
            sequence_length=declared,
        )
        for groups, are_joined in ((short, short_ones_are), (long, False), (short, short_ones_are)):
            batches = tokens_run(fast, groups, rule)
            assert all(is_joined(users.batch) is are_joined for users in batches)
            found = fast.clipped_sum(groups, rule).total.views
            assert difference(found, plain_sum(model, groups, rule)) < 1e-10


def test_model_inside_another_module_and_tiny_vocabularies_are_run_as_before() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = models_zoo.build("llama")

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.inner(input_ids=input_ids, use_cache=False).logits

    wrapped, rule = shake(Wrapped()), FlatClip(clip_norm=0.5)
    fast = FastClipping(wrapped, trainable(wrapped), rule, record_loss=causal_lm_loss)
    found = fast.clipped_sum(cohort(RAGGED), rule).total.views
    assert difference(found, plain_sum(wrapped, cohort(RAGGED), rule)) <= 1e-10
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**TINY | {"vocab_size": 3})
    ).double()
    groups = [
        group | {name: group[name] % 3 for name in ("input_ids",)} for group in cohort(RAGGED)
    ]
    for group in groups:
        group["labels"] = torch.where(group["labels"] < 0, -100, group["labels"] % 3)
    assert can_join(model, causal_lm_loss, 16)
    assert_same_as_plain(shake(model), groups, settings=JOINED)


def test_joined_rows_are_no_longer_than_a_batch() -> None:
    groups = cohort([[14, 3, 2, 4, 3, 2], [2, 2, 13], [3, 3, 3, 12, 2]])
    fast = clipping_of("llama", StepSettings(join_records=True, microbatch_tokens=16))
    batches = tokens_run(fast, groups, FlatClip(clip_norm=0.5))
    assert max(users.batch["input_ids"].numel() for users in batches) <= 16


def test_dropout_is_named_as_the_reason_where_it_is_on() -> None:
    model = models_zoo.build("gpt2 tied").train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    with pytest.raises(InputError, match="dropout at"):
        FastClipping(
            model,
            trainable(model),
            FlatClip(clip_norm=0.5),
            record_loss=causal_lm_loss,
            settings=JOINED,
        )


def test_names_of_joined_tensors_are_nobody_elses() -> None:
    # A batch of one's own may have positions and weights of any shape.
    model = shake(models_zoo.build("llama"))
    groups = [
        group
        | {
            "position_ids": torch.arange(group["input_ids"].shape[1]).repeat(
                len(group["input_ids"]), 1
            ),
            "token_weights": torch.full((len(group["input_ids"]),), 2.0),
        }
        for group in cohort([[5, 5], [5], [5, 5, 5]])
    ]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        assert batch["position_ids"].shape == batch["input_ids"].shape
        return batch["token_weights"] * causal_lm_loss(model, batch)

    assert_same_as_plain(model, groups, record_loss=loss)


def test_rows_of_one_record_stay_within_the_positions_beside_joined_ones() -> None:
    # Rows of joined records hold 16 tokens, and this model has ten positions.
    model = shake(models_zoo.gpt2(positions=10).double().eval())
    groups = cohort([[9, 9], [9, 1, 1, 1], [8], [9, 2, 2]])
    settings = StepSettings(mix_sizes=True)
    rule = FlatClip(clip_norm=middle_clip(model, groups))
    fast = FastClipping(
        model, trainable(model), rule, record_loss=causal_lm_loss, settings=settings
    )
    found = fast.clipped_sum(groups, rule).total.views
    assert difference(found, plain_sum(model, groups, rule)) <= 1e-10


def test_values_of_another_width_than_keys_are_not_joined() -> None:
    # The kernels take one width, and without a GPU nothing else would show it.
    model = transformers.YoutuForCausalLM(
        transformers.YoutuConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=6,
            max_position_embeddings=32,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).eval()
    assert not can_join(model, causal_lm_loss, 16)
