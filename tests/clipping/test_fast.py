"""The fast path gives the plain loop's sum: every architecture, every form, every cohort."""

from __future__ import annotations

import contextlib
import math
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
    fast_sum,
    middle_clip,
    norms,
    pairs_wherever_possible,
    plain_sum,
    shake,
    squares_wherever_possible,
    trainable,
)
from hypothesis import strategies as st
from torch import nn

import models_zoo
from userdp.clipping.batches.users import Users
from userdp.clipping.checks.verify import FastPathError
from userdp.clipping.fast import AddBatch, FastClipping
from userdp.clipping.gradients.many_users import ManyUsers
from userdp.clipping.plain import PlainClipping
from userdp.clipping.rules import (
    AutomaticClip,
    ClipRule,
    FlatClip,
    NormalisedClip,
    PerLayerClip,
)
from userdp.clipping.settings import StepSettings
from userdp.losses import Batch, causal_lm_loss
from userdp.models.adapters import Lora, add_lora

ZOO = [*models_zoo.BUILDERS, *models_zoo.MORE_BUILDERS]
FORMS = {
    "stored": contextlib.nullcontext,
    "squared": squares_wherever_possible,
    "pairs": pairs_wherever_possible,
}


@pytest.mark.parametrize(
    ("dtype", "forms"),
    [
        *((torch.float64, forms) for forms in FORMS),
        (torch.float32, "stored"),
        # Formulas are seen in float64; what float32 adds is seen in one form of them.
        *(pytest.param(torch.float32, f, marks=pytest.mark.slow) for f in ("squared", "pairs")),
    ],
)
@pytest.mark.parametrize("name", ZOO)
def test_fast_path_matches_plain_loop(name: str, dtype: torch.dtype, forms: str) -> None:
    model = shake(models_zoo.build(name, dtype))
    groups = cohort(RAGGED, masked=name in models_zoo.MASKED)
    # Gemma's norm computes in float32 even in a float64 model.
    tolerance = 1e-7 if name == "gemma" and dtype == torch.float64 else None
    with FORMS[forms]():
        assert_same_as_plain(
            model, groups, record_loss=models_zoo.loss_of(name), tolerance=tolerance
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "name", ["gpt2 + lora", "llama tied + lora", "llama tied and trained + lora"]
)
def test_merged_adapters_match_the_plain_loop(name: str, dtype: torch.dtype) -> None:
    model = shake(models_zoo.build(name, dtype))
    for rule in (None, PerLayerClip(clip_norm=0.05)):
        assert_same_as_plain(
            model, cohort(RAGGED), rule=rule, settings=StepSettings(merge_lora=True)
        )


@pytest.mark.parametrize("merge_lora", [False, True])
@pytest.mark.parametrize("name", ["gpt2 tied", "llama"])
def test_adapters_with_a_frozen_factor_match_the_plain_loop(name: str, merge_lora: bool) -> None:
    adapted = add_lora(models_zoo.build(name), Lora(rank=2, freeze_a=True)).double()
    model = shake(adapted)
    assert_same_as_plain(model, cohort(RAGGED), settings=StepSettings(merge_lora=merge_lora))


@pytest.mark.parametrize("group_size", [1, 2, 5])
@pytest.mark.parametrize("name", ["gpt2 tied", "llama tied + lora", "bert", "lstm"])
def test_fast_path_matches_plain_loop_for_full_groups_of(name: str, group_size: int) -> None:
    model = shake(models_zoo.build(name))
    lengths = [[3 + (user + row) % 6 for row in range(group_size)] for user in range(6)]
    groups = cohort(lengths, masked=name in models_zoo.MASKED)
    assert_same_as_plain(model, groups, record_loss=models_zoo.loss_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize(
    "rule",
    [
        FlatClip(clip_norm=1.0),
        FlatClip(clip_norm=math.inf),
        PerLayerClip(clip_norm=1.0),
        PerLayerClip(clip_norm=math.inf),
        NormalisedClip(clip_norm=0.7),
        AutomaticClip(),
        AutomaticClip(stability=2.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["gpt2 tied", "llama tied and trained + lora"])
def test_every_clip_rule_gives_what_the_plain_loop_gives(
    name: str, rule: ClipRule, forms: str
) -> None:
    with FORMS[forms]():
        assert_same_as_plain(shake(models_zoo.build(name)), cohort(RAGGED), rule=rule)


@pytest.mark.parametrize("name", ["gpt2 tied", "bert"])
def test_microbatch_size_does_not_change_the_sum(name: str) -> None:
    model = shake(models_zoo.build(name))
    groups = cohort(RAGGED, masked=name in models_zoo.MASKED)
    loss = models_zoo.loss_of(name)
    rule = FlatClip(clip_norm=middle_clip(model, groups, loss))
    # From users cut into single rows to the whole cohort at once.
    sums = [
        fast_sum(model, groups, rule, loss, StepSettings(microbatch_tokens=tokens))
        for tokens in (1, 16, 40, 1000)
    ]
    assert max(difference(other, sums[-1]) for other in sums[:-1]) <= 1e-12


@pytest.mark.parametrize("name", ["gpt2 tied", "llama tied + lora"])
def test_user_of_a_hundred_long_records_is_clipped_once(name: str) -> None:
    # 100 x 30 tokens in batches of 256: a dozen pieces, which add up before the one clipping.
    model = shake(models_zoo.build(name))
    groups = cohort([[30] * 100, [30], [5, 6], [20, 10, 30]])
    rule = FlatClip(clip_norm=norms(model, groups)[0] / 2)
    assert_same_as_plain(model, groups, rule=rule, settings=StepSettings(microbatch_tokens=256))
    alone = fast_sum(model, groups[:1], rule, settings=StepSettings(microbatch_tokens=256))
    norm = math.sqrt(sum(float(t.square().sum()) for t in alone))
    assert norm <= rule.clip_norm * (1 + 1e-5)
    assert norm >= rule.clip_norm * (1 - 1e-5)


@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize("mix", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "gpt2 tied",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama tied + lora", "lstm")),
    ],
)
def test_what_an_earlier_cohort_left_in_the_sum_does_not_count(
    name: str, mix: bool, forms: str
) -> None:
    # Cohorts of one batch (of several users and of one), of several batches, of a user larger than
    # a batch, and of nobody.
    model = shake(models_zoo.build(name))
    rule = FlatClip(clip_norm=0.5)
    settings = StepSettings(microbatch_tokens=40, join_records=False, mix_sizes=mix)
    with FORMS[forms]():
        fast = FastClipping(
            model, trainable(model), rule, record_loss=causal_lm_loss, settings=settings
        )
        for lengths in ([[5]] * 4, [[4]], RAGGED, [[9] * 12], [], [[]], [[5, 3]] * 2, [[5]] * 20):
            groups = cohort(lengths, seed=len(lengths))
            found = fast.clipped_sum(groups, rule)
            if any(lengths):
                assert difference(found.total.views, plain_sum(model, groups, rule)) <= 1e-10
            else:
                assert not any(view.any() for view in found.total.views)
            # Noise, or what else is done to a sum in place.
            found.total.values.fill_(1e3)


def test_one_captured_step_serves_cohorts_of_one_batch_and_of_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = shake(models_zoo.build("gpt2 tied"))
    rule = FlatClip(clip_norm=0.5)
    settings = StepSettings(microbatch_tokens=40, join_records=False)
    fast = FastClipping(
        model, trainable(model), rule, record_loss=causal_lm_loss, settings=settings
    )

    captures: list[Users] = []

    def captured(add: AddBatch, users: Users) -> AddBatch:
        captures.append(users)
        return add

    fast._graphs = True
    monkeypatch.setattr(fast, "_captured", captured)
    # The same shape once, several times and once again.
    for count in (2, 6, 2, 4, 6, 2):
        groups = cohort([[5]] * count, seed=count)
        found = fast.clipped_sum(groups, rule)
        assert difference(found.total.views, plain_sum(model, groups, rule)) <= 1e-10
        found.total.values.fill_(1e3)
    assert len(captures) == len({users.shape for users in captures})


class Half(nn.Module):
    """One of two layers is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def _squares(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch["x"]).square().sum(1)


@pytest.mark.parametrize("users", [1, 3])
def test_a_parameter_that_a_batch_does_not_use_gets_zero(users: int) -> None:
    torch.manual_seed(0)
    model, rule = Half(), FlatClip(clip_norm=0.5)
    groups = [{"x": torch.randn(2, 3).double()} for _ in range(users)]
    fast = FastClipping(model, trainable(model), rule, record_loss=_squares)
    fast._total.values.fill_(1e3)
    found = fast.clipped_sum(groups, rule).total.views
    assert difference(found, plain_sum(model, groups, rule, _squares)) <= 1e-10
    assert not found[2].any()
    assert not found[3].any()


def test_a_step_that_leaves_a_value_unset_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ManyUsers.__call__

    def forgetful(self: ManyUsers, users: Users, total: list[torch.Tensor], *rest: Any, **how: Any):  # type: ignore[no-untyped-def]
        left = total[1].clone()
        norms = honest(self, users, total, *rest, **how)
        total[1].copy_(left)
        return norms

    monkeypatch.setattr(ManyUsers, "__call__", forgetful)
    torch.manual_seed(0)
    model, rule = Half(), FlatClip(clip_norm=0.5)
    groups = [{"x": torch.randn(2, 3).double()} for _ in range(3)]
    fast = FastClipping(model, trainable(model), rule, record_loss=_squares)
    with pytest.raises(FastPathError, match=r"'used\.bias'"):
        fast.clipped_sum(groups, rule)
    # What the comparison did to the sum is undone.
    assert not fast._total.values.any()


def test_cohort_without_users_sums_to_zero() -> None:
    model = models_zoo.build("gpt2 tied")
    for groups in ([], cohort([[], []])):
        assert all(not t.any() for t in fast_sum(model, groups, FlatClip(clip_norm=1.0)))


def test_a_second_cohort_does_not_see_the_first() -> None:
    model = shake(models_zoo.build("gpt2 tied"))
    rule = FlatClip(clip_norm=1.0)
    fast = FastClipping(model, trainable(model), rule, record_loss=causal_lm_loss)
    for seed in range(3):
        groups = cohort(RAGGED, seed=seed)
        found = fast.clipped_sum(groups, rule).total.views
        assert difference(found, plain_sum(model, groups, rule)) <= 1e-10


def test_weights_that_change_between_steps_are_seen() -> None:
    model = shake(models_zoo.build("llama tied"))
    rule = FlatClip(clip_norm=1.0)
    groups = cohort(RAGGED)
    fast = FastClipping(model, trainable(model), rule, record_loss=causal_lm_loss)
    fast.clipped_sum(groups, rule)
    with torch.no_grad():
        for parameter in trainable(model):
            parameter.mul_(1.1)
    found = fast.clipped_sum(groups, rule).total.views
    assert difference(found, plain_sum(model, groups, rule)) <= 1e-10


@pytest.mark.parametrize("forms", FORMS)
def test_updates_within_the_clip_norm_are_counted_alike(forms: str) -> None:
    model = shake(models_zoo.build("gpt2 tied"))
    groups = cohort([*RAGGED, [30] * 5])
    rule = FlatClip(clip_norm=middle_clip(model, groups))
    plain = PlainClipping(model, trainable(model), record_loss=causal_lm_loss)
    expected = plain.clipped_sum(groups, rule)
    with FORMS[forms]():
        fast = FastClipping(
            model,
            trainable(model),
            rule,
            record_loss=causal_lm_loss,
            settings=StepSettings(microbatch_tokens=100),
        )
        found = fast.clipped_sum(groups, rule)
    assert 1 < int(expected.num_within) < len(groups) - 1
    assert int(found.num_within) == int(expected.num_within)
    # One of the groups has no record.
    assert found.num_updates == expected.num_updates == len(groups) - 1


# ---- random models


def random_llama(draw: st.DrawFn) -> nn.Module:
    heads = draw(st.sampled_from([1, 2, 4]))
    width = 2 * heads * draw(st.integers(1, 4))
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=models_zoo.VOCABULARY,
            hidden_size=width,
            intermediate_size=draw(st.integers(1, 20)),
            num_hidden_layers=draw(st.integers(1, 3)),
            num_attention_heads=heads,
            num_key_value_heads=draw(st.sampled_from([1, heads])),
            max_position_embeddings=32,
            tie_word_embeddings=draw(st.booleans()),
            attention_bias=draw(st.booleans()),
            mlp_bias=draw(st.booleans()),
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def random_gpt2(draw: st.DrawFn) -> nn.Module:
    heads = draw(st.integers(1, 4))
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=models_zoo.VOCABULARY,
            n_positions=32,
            # A norm over one number is zero.
            n_embd=heads * draw(st.integers(2, 6)),
            n_layer=draw(st.integers(1, 3)),
            n_head=heads,
            n_inner=draw(st.integers(1, 20)),
            tie_word_embeddings=draw(st.booleans()),
            bos_token_id=0,
            eos_token_id=0,
        )
    )


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    torch.manual_seed(draw(st.integers(0, 2**31)))
    model = draw(st.sampled_from([random_llama, random_gpt2]))(draw)
    rank = draw(st.sampled_from([None, None, 1, 3]))
    if rank is not None:
        model = add_lora(model, Lora(rank=rank, alpha=2.0))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.2)
    return shake(model.to(torch.float64).eval())


COHORTS = st.lists(st.lists(st.integers(2, 14), max_size=4), min_size=2, max_size=7).filter(
    lambda users: any(users)
)


@pytest.mark.slow
@hypothesis.given(
    model=models(),
    lengths=COHORTS,
    clip_norm=st.floats(0.01, 10),
    tokens=st.integers(8, 200),
    forms=st.sampled_from(list(FORMS)),
)
@hypothesis.settings(max_examples=60)
def test_fast_path_matches_plain_loop_on_random_models_and_cohorts(
    model: nn.Module, lengths: list[list[int]], clip_norm: float, tokens: int, forms: str
) -> None:
    with FORMS[forms]():
        assert_same_as_plain(
            model,
            cohort(lengths),
            rule=FlatClip(clip_norm=clip_norm),
            settings=StepSettings(microbatch_tokens=tokens),
        )
