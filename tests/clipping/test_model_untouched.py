"""The model is what it was: after a step, after a failed one, for everyone who uses it next."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from comparing import RAGGED, cohort, fast_sum, shake
from torch import Tensor, nn

import models_zoo
from userdp.clipping.rules import FlatClip
from userdp.clipping.settings import StepSettings
from userdp.errors import MixedExamplesError
from userdp.losses import Batch, causal_lm_loss

RULE = FlatClip(clip_norm=0.5)
NAMES = ["gpt2 tied", "llama tied + lora", "lstm", "gemma", "own parameter", "bert"]
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
)


def portrait(model: nn.Module) -> dict[str, Any]:
    """Everything about the model that a step could have changed."""
    config = getattr(model, "config", None)
    return {
        "classes": {name: type(module) for name, module in model.named_modules()},
        "keys": {name: set(module.__dict__) for name, module in model.named_modules()},
        "hooks": {
            (name, kind): len(getattr(module, kind))
            for name, module in model.named_modules()
            for kind in HOOKS
        },
        "training": {name: module.training for name, module in model.named_modules()},
        "attention": getattr(config, "_attn_implementation", None),
        "config": config.to_dict() if config is not None else None,
        "needs gradient": {name: p.requires_grad for name, p in model.named_parameters()},
        "gradients": {name: p.grad is None for name, p in model.named_parameters()},
        "tensors": {name: id(t) for name, t in model.state_dict(keep_vars=True).items()},
        "parameter hooks": {name: p._backward_hooks for name, p in model.named_parameters()},
    }


def assert_untouched(model: nn.Module, run: Callable[[], Any]) -> None:
    before, weights = portrait(model), copy.deepcopy(model.state_dict())
    run()
    after = portrait(model)
    for what, value in before.items():
        assert after[what] == value, what
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


def step(name: str, model: nn.Module, **settings: Any) -> list[Tensor]:
    groups = cohort(RAGGED, masked=name in models_zoo.MASKED)
    loss = models_zoo.loss_of(name)
    return fast_sum(model, groups, RULE, loss, StepSettings(**settings))


@pytest.mark.parametrize("tokens", [8, 1000])
@pytest.mark.parametrize("name", NAMES)
def test_step_leaves_the_model_as_it_was(name: str, tokens: int) -> None:
    model = models_zoo.build(name)
    assert_untouched(model, lambda: step(name, model, microbatch_tokens=tokens))


def test_step_with_merged_adapters_leaves_the_model_as_it_was() -> None:
    model = models_zoo.build("llama tied + lora")
    assert_untouched(model, lambda: step("llama tied + lora", model, merge_lora=True))


@pytest.mark.parametrize("tokens", [8, 1000])
@pytest.mark.parametrize("name", NAMES)
def test_step_that_fails_leaves_the_model_as_it_was(name: str, tokens: int) -> None:
    model = models_zoo.build(name)
    loss = models_zoo.loss_of(name)
    calls = 0

    def failing(model: nn.Module, batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        # The survey's tiny pass is the first: the layers are swapped from the second on.
        if calls > 1:
            raise RuntimeError("out of memory")
        return loss(model, batch)

    def run() -> None:
        with pytest.raises(RuntimeError, match="out of memory"):
            fast_sum(
                model,
                cohort(RAGGED, masked=name in models_zoo.MASKED),
                RULE,
                failing,
                StepSettings(microbatch_tokens=tokens),
            )

    assert_untouched(model, run)


def test_failure_in_the_backward_pass_leaves_the_model_as_it_was() -> None:
    model = models_zoo.build("gpt2 tied")

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise RuntimeError("out of memory")

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return Failing.apply(causal_lm_loss(model, batch))

    def run() -> None:
        with pytest.raises(RuntimeError, match="out of memory"):
            fast_sum(model, cohort(RAGGED), RULE, loss)

    assert_untouched(model, run)


def test_saved_and_loaded_model_gives_the_same_logits_after_a_step(tmp_path: Path) -> None:
    model: Any = shake(models_zoo.build("gpt2 tied", torch.float32))
    step("gpt2 tied", model)
    model.save_pretrained(tmp_path / "model")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    ids = torch.arange(1, 9)[None]
    assert type(loaded) is type(model)
    assert loaded.config._attn_implementation == model.config._attn_implementation
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)


def test_generation_is_the_same_after_a_step() -> None:
    model: Any = shake(models_zoo.build("llama tied", torch.float32))
    ids = torch.arange(1, 5)[None]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    before = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    step("llama tied", model)
    after = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert before.shape[1] == 10
    assert torch.equal(before, after)


def test_adapter_is_saved_and_loaded_after_a_step(tmp_path: Path) -> None:
    model: Any = models_zoo.build("llama tied + lora", torch.float32)
    step("llama tied + lora", model)
    model.save_pretrained(tmp_path / "adapter")
    torch.manual_seed(0)
    base: Any = models_zoo.llama(tied=True).eval()
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ids = torch.arange(1, 9)[None]
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=ids).logits, loaded(input_ids=ids).logits)


def test_model_can_be_copied_after_a_step() -> None:
    model = models_zoo.build("gpt2 tied")
    step("gpt2 tied", model)
    twin = copy.deepcopy(model)
    assert {type(m) for m in twin.modules()} == {type(m) for m in model.modules()}


def test_ordinary_training_works_after_a_step() -> None:
    model = shake(models_zoo.build("gpt2 tied"))
    reference = shake(models_zoo.build("gpt2 tied"))
    step("gpt2 tied", model)
    batch = models_zoo.ragged_batch([5, 8], seed=1)
    for each in (model, reference):
        causal_lm_loss(each, batch).sum().backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("name", ["gpt2 tied", "own parameter"])
def test_nothing_of_a_step_is_kept_alive_by_a_cycle(name: str) -> None:
    # What is kept is a user's gradient: it must go when the step ends, not when gc runs.
    model = models_zoo.build(name)
    seen: list[weakref.ref[Tensor]] = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        losses = causal_lm_loss(model, batch)
        seen.append(weakref.ref(losses))
        return losses

    gc.collect()
    gc.disable()
    try:
        fast_sum(model, cohort(RAGGED), RULE, loss)
        assert seen
        assert not any(reference() is not None for reference in seen)
    finally:
        gc.enable()


def test_replaced_forward_of_a_layer_is_refused_by_name() -> None:
    # As accelerate's hooks do: the object's own attribute hides the class's forward.
    model: Any = models_zoo.build("gpt2 tied")
    layer = model.transformer.h[0].mlp.c_fc
    layer.forward = layer.forward

    def run() -> None:
        with pytest.raises(MixedExamplesError, match=r"forward of a Conv1D.*path=\"plain\""):
            step("gpt2 tied", model)

    assert_untouched(model, run)
