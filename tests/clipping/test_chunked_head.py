"""Logits piece by piece: the same sum, and memory that does not grow with the vocabulary."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from comparing import (
    RAGGED,
    assert_same_as_plain,
    cohort,
    fast_sum,
    pairs_wherever_possible,
    shake,
    squares_wherever_possible,
    trainable,
)
from test_model_untouched import assert_untouched
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import models_zoo
from userdp.clipping.execute import chunked_head
from userdp.clipping.execute.chunked_head import returns_its_logits
from userdp.clipping.fast import FastClipping
from userdp.clipping.gradients import chunk_choice
from userdp.clipping.rules import FlatClip, PerLayerClip
from userdp.clipping.settings import StepSettings
from userdp.errors import InputError
from userdp.losses import causal_lm_loss

NAMES = ["gpt2 tied", "llama tied", "llama tied + lora", "llama"]
RULE = FlatClip(clip_norm=0.5)


def chunking(**settings: Any) -> StepSettings:
    return StepSettings(chunk_logits=True, **settings)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a few tokens or words; the last one is smaller."""
    monkeypatch.setattr(chunked_head, "LOGITS_AT_ONCE", 7 * models_zoo.VOCABULARY)
    monkeypatch.setattr(chunked_head, "TILE", 4)


@pytest.mark.parametrize("mix_sizes", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_pieces_give_the_plain_loops_sum(name: str, mix_sizes: bool) -> None:
    settings = chunking(mix_sizes=mix_sizes, microbatch_tokens=400)
    assert_same_as_plain(shake(models_zoo.build(name)), cohort(RAGGED), settings=settings)


def test_a_head_that_shares_its_weight_with_a_layer_without_a_rule() -> None:
    model = shake(models_zoo.build("gemma"))
    # Gemma's norm computes in float32 even in a float64 model.
    assert_same_as_plain(model, cohort(RAGGED), settings=chunking(), tolerance=1e-7)


@pytest.mark.parametrize("name", ["llama tied", "llama"])
def test_pieces_hand_out_squares(name: str) -> None:
    settings = chunking(mix_sizes=True, microbatch_tokens=400)
    with squares_wherever_possible():
        assert_same_as_plain(shake(models_zoo.build(name)), cohort(RAGGED), settings=settings)


def test_the_other_layers_may_have_pairs() -> None:
    with pairs_wherever_possible(), heads_are_stored():
        model = shake(models_zoo.build("llama tied"))
        assert_same_as_plain(model, cohort(RAGGED), settings=chunking())


@contextlib.contextmanager
def heads_are_stored() -> Iterator[None]:
    from userdp.clipping.gradients import probes

    prefers = probes.Probes._prefers_pair
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            probes.Probes,
            "_prefers_pair",
            lambda self, layer: not self._is_head(layer) and prefers(self, layer),
        )
        yield


@pytest.mark.parametrize("name", ["llama tied", "llama tied + lora"])
def test_users_alone_and_in_pieces_give_the_plain_loops_sum(name: str) -> None:
    model = shake(models_zoo.build(name))
    settings = chunking(microbatch_tokens=10, checkpoint_blocks=True)
    assert_same_as_plain(model, cohort([[9, 9, 9], [5, 6], [9], [3]]), settings=settings)


@pytest.mark.parametrize("name", ["gpt2 tied", "llama tied + lora"])
def test_joined_records_and_layers_clipped_apart(name: str) -> None:
    model = shake(models_zoo.build(name))
    assert_same_as_plain(model, cohort(RAGGED), settings=chunking(join_records=True))
    layered = PerLayerClip(clip_norm=0.5)
    assert_same_as_plain(model, cohort(RAGGED), rule=layered, settings=chunking())


@pytest.mark.parametrize("name", ["llama tied", "llama tied + lora"])
def test_bfloat16_products_are_as_close_as_without_pieces(name: str) -> None:
    model = shake(models_zoo.build(name, torch.float32))
    groups = cohort([[9, 9]] * 4)
    exact = fast_sum(model, groups, RULE, settings=StepSettings())
    off = [
        sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True)) ** 0.5
        for chunk in (False, True)
        for found in [
            fast_sum(
                model,
                groups,
                RULE,
                settings=StepSettings(compute_dtype=torch.bfloat16, chunk_logits=chunk),
            )
        ]
    ]
    assert 0 < off[1] <= 1.25 * off[0]


def test_a_user_of_infinite_values_counts_as_zero() -> None:
    model = shake(models_zoo.build("llama tied"))
    groups = cohort([[5, 6], [7], [4]])
    expected = fast_sum(model, groups[1:], RULE, settings=chunking())

    def infinite(model: nn.Module, batch: Any, **options: Any) -> torch.Tensor:
        losses = causal_lm_loss(model, batch, **options)
        is_first = (batch["input_ids"][:, 0] == groups[0]["input_ids"][0, 0]).to(losses.dtype)
        return losses * torch.where(is_first > 0, torch.inf, 1.0)

    for group in groups[1:]:
        assert group["input_ids"][0, 0] != groups[0]["input_ids"][0, 0]
    with pytest.MonkeyPatch.context() as patch:
        from userdp.clipping.execute import execution

        patch.setattr(execution, "causal_lm_loss", infinite)
        alone = [{name: rows[:1] for name, rows in groups[0].items()}, *groups[1:]]
        found = fast_sum(model, alone, RULE, settings=chunking())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_the_model_is_left_as_it_was() -> None:
    model = models_zoo.build("llama tied")
    assert_untouched(
        model,
        lambda: FastClipping(
            model, trainable(model), RULE, record_loss=causal_lm_loss, settings=chunking()
        ).clipped_sum(cohort(RAGGED), RULE),
    )


# ---- memory


class Largest(TorchDispatchMode):
    """The most values that one result has."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and 0 not in leaf.stride():
                self.most = max(self.most, leaf.numel())
        return found


def large_vocabulary(words: int) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=words,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    return models_zoo._with_lora(model).double().eval()


@pytest.mark.parametrize("chunk", [False, True])
def test_no_tensor_of_all_logits_is_made(chunk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_head, "LOGITS_AT_ONCE", 3000)
    model = large_vocabulary(500)
    groups = cohort([[16]] * 8)
    fast = FastClipping(
        model,
        trainable(model),
        RULE,
        record_loss=causal_lm_loss,
        settings=StepSettings(chunk_logits=chunk, check=False, join_records=False),
    )
    # The first time the model is looked at, too.
    fast.clipped_sum(groups, RULE)
    with Largest() as seen:
        fast.clipped_sum(groups, RULE)
    logits = 8 * 16 * 500
    # The head's own weight is the largest tensor then.
    assert seen.most <= 8 * 500 if chunk else seen.most >= logits


# ---- when


def test_large_logits_come_in_pieces_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models_zoo.build("llama tied")

    def chosen(wanted: bool | None, tokens: int) -> bool:
        return chunk_choice.chunks_logits(model, causal_lm_loss, wanted, tokens=tokens, itemsize=2)

    most = chunk_choice.LARGE_LOGITS // models_zoo.VOCABULARY // 2
    assert [chosen(None, most), chosen(None, most + 1)] == [False, True]
    assert [chosen(True, 1), chosen(False, 2 * most)] == [True, False]


def test_logits_that_are_bent_stay_whole() -> None:
    assert returns_its_logits(models_zoo.build("llama"))
    bent = models_zoo.of_family("Gemma2", final_logit_softcapping=5.0, head_dim=8)
    assert not returns_its_logits(bent)
    with pytest.raises(InputError, match=r"chunk_logits=True.*Leave chunk_logits off"):
        FastClipping(bent, trainable(bent), RULE, record_loss=causal_lm_loss, settings=chunking())


def test_a_loss_of_ones_own_and_other_models_are_refused() -> None:
    model = models_zoo.build("llama")

    def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return causal_lm_loss(model, batch)

    for wrong, loss in ((model, own_loss), (models_zoo.build("lstm tied"), causal_lm_loss)):
        with pytest.raises(InputError, match="chunk_logits=True"):
            FastClipping(wrong, trainable(wrong), RULE, record_loss=loss, settings=chunking())
