"""Records of 4,096 tokens: a private step on them is taken, and the fast path's sum is right."""

from __future__ import annotations

import comparing
import pytest
import torch
import transformers
from torch import Tensor, nn

from userdp import Plan, PrivateStep, UserIndex
from userdp.clipping.rules import FlatClip
from userdp.clipping.settings import StepSettings
from userdp.streams import RunSecret

LENGTH = 4096
VOCABULARY = 23


def long_llama() -> nn.Module:
    torch.manual_seed(2)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=LENGTH,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    ).eval()


def records(lengths: list[int], *, seed: int) -> dict[str, Tensor]:
    """Records of these lengths, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    there = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_ids": ids * there, "labels": ids.where(there, -100)}


@pytest.mark.slow
def test_fast_path_equals_the_plain_loop_on_long_records() -> None:
    # A long and a short user share a batch, so padding is long, too.
    groups = [records([LENGTH, 90], seed=1), records([LENGTH - 1], seed=2), records([7], seed=3)]
    model = long_llama()
    rule = FlatClip(clip_norm=comparing.middle_clip(model, groups))
    comparing.assert_same_as_plain(model, groups, rule=rule)


@pytest.mark.slow
def test_private_step_trains_on_records_of_4096_tokens() -> None:
    """Without noise, the step is the clipped sum of the plain loop over the public divisor."""
    model = long_llama()
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in parameters]
    groups = [records([LENGTH], seed=user) for user in range(2)]
    plan = Plan.sample_users(
        num_users=2,
        expected_cohort_size=2,
        group_size=1,
        steps=1,
        clip_norm=0.5,
        noise_multiplier=0.0,
        delta=1e-2,
        non_private=True,
    )
    step = PrivateStep(
        model,
        torch.optim.SGD(parameters, lr=1.0),
        plan,
        UserIndex.from_owners(["ann", "bob"]),
        sequence_length=LENGTH,
        secret=RunSecret.fixed_for_tests(1),
    )
    expected = comparing.plain_sum(model, groups, FlatClip(clip_norm=0.5))
    for cohort in step.cohorts():
        step.apply(groups[int(rows[0])] for rows in cohort)
    for start, now, total in zip(before, parameters, expected, strict=True):
        torch.testing.assert_close(start - now, total / 2, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [False, True])
def test_a_user_of_32768_tokens_runs_in_pieces_beside_others(chunk: bool) -> None:
    groups = [records([1_024] * 32, seed=1), records([90, 8], seed=2), records([7], seed=3)]
    model = long_llama().double()
    settings = StepSettings(chunk_logits=chunk, microbatch_tokens=4_096, check=False)
    comparing.assert_same_as_plain(model, groups, settings=settings)
