"""Blocks that run again in the backward pass: the same sum, less memory, the model as it was."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from comparing import (
    RAGGED,
    assert_same_as_plain,
    cohort,
    fast_sum,
    pairs_wherever_possible,
    shake,
    trainable,
)
from test_model_untouched import assert_untouched
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers.modeling_layers import GradientCheckpointingLayer

import models_zoo
from userdp.clipping.execute import execution
from userdp.clipping.execute.checkpoint import blocks_of, checkpointed_blocks
from userdp.clipping.execute.execution import Execution
from userdp.clipping.fast import FastClipping
from userdp.clipping.rules import FlatClip
from userdp.clipping.settings import StepSettings
from userdp.errors import InputError
from userdp.losses import Batch, causal_lm_loss

RULE = FlatClip(clip_norm=0.5)
FORMS = {"stored": contextlib.nullcontext, "pairs": pairs_wherever_possible}
# OPT flattens rows and tokens, BERT is no decoder, Gemma's norms have no rule of their own.
NAMES = ["gpt2 tied", "llama tied", "llama tied + lora", "opt", "bert", "gemma"]
WITHOUT_BLOCKS = ["lstm tied", "own parameter", "albert"]
# Users of one size: all in one batch.
ALIKE = [[9, 9]] * 4


def checkpointing(**settings: Any) -> StepSettings:
    return StepSettings(checkpoint_blocks=True, **settings)


# ---- the sum


@pytest.mark.slow
@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize("mix_sizes", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_checkpointed_blocks_give_the_plain_loops_sum(
    name: str, mix_sizes: bool, forms: str
) -> None:
    with FORMS[forms]():
        assert_same_as_plain(
            shake(models_zoo.build(name)),
            cohort(RAGGED, masked=name in models_zoo.MASKED),
            record_loss=models_zoo.loss_of(name),
            settings=checkpointing(mix_sizes=mix_sizes, microbatch_tokens=400),
            # Gemma's norm computes in float32 even in a float64 model.
            tolerance=1e-7 if name == "gemma" else None,
        )


def test_checkpointed_blocks_give_the_plain_loops_sum_of_joined_records() -> None:
    settings = checkpointing(join_records=True)
    assert_same_as_plain(shake(models_zoo.build("gpt2 tied")), cohort(RAGGED), settings=settings)


@pytest.mark.parametrize("merge_lora", [False, True])
def test_users_alone_and_in_pieces_give_the_plain_loops_sum(merge_lora: bool) -> None:
    model = shake(models_zoo.build("llama tied + lora"))
    settings = checkpointing(microbatch_tokens=10, merge_lora=merge_lora)
    assert_same_as_plain(model, cohort([[9, 9, 9], [5, 6], [9], [3]]), settings=settings)


def test_sum_in_bfloat16_is_bitwise_the_same() -> None:
    # The second run must be computed in what autocast chose for the first.
    model = shake(models_zoo.build("llama tied", torch.float32))
    found = [
        fast_sum(
            model,
            cohort(RAGGED),
            RULE,
            settings=StepSettings(compute_dtype=torch.bfloat16, checkpoint_blocks=checkpoint),
        )
        for checkpoint in (False, True)
    ]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("own", [False, True])
def test_state_of_the_random_numbers_is_not_read(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nor may it be: the pass is captured as a CUDA graph. Hugging Face's checkpointing reads it.
    def refuse() -> Tensor:
        raise RuntimeError("the state was read")

    model: Any = models_zoo.build("llama tied")
    if own:
        model.gradient_checkpointing_enable()
        # Where it runs; this model has no dropout.
        model.train()
    groups = cohort(ALIKE)
    fast = clipping(model, checkpoint_blocks=True)
    # The first time the model is looked at, too; that is not captured.
    fast.clipped_sum(groups, RULE)
    monkeypatch.setattr(torch, "get_rng_state", refuse)
    fast.clipped_sum(groups, RULE)


def test_dropout_inside_a_block_stays_off() -> None:
    # OPT's blocks read their own training flag: switching it on would drop values out.
    torch.manual_seed(0)
    model = models_zoo.of_family("OPT", ffn_dim=24, word_embed_proj_dim=16, dropout=0.3)
    assert_same_as_plain(shake(model.double().eval()), cohort(RAGGED), settings=checkpointing())


class OwnScaleBlock(GradientCheckpointingLayer):
    """A block with a parameter of its own, which as a whole has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.inner(x))


class NestedBlock(GradientCheckpointingLayer):
    """A block inside a block, beside an ordinary layer."""

    def __init__(self) -> None:
        super().__init__()
        self.block = OwnScaleBlock()
        self.outer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.outer(self.block(x)))


class BlocksOfManyKinds(nn.Module):
    """Blocks of its own, outside of any Hugging Face model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models_zoo.VOCABULARY, 8)
        self.blocks = nn.Sequential(OwnScaleBlock(), NestedBlock())
        self.head = nn.Linear(8, models_zoo.VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(input_ids)))


def test_blocks_without_a_rule_and_blocks_in_blocks_give_the_plain_loops_sum() -> None:
    torch.manual_seed(0)
    model = BlocksOfManyKinds().double().eval()
    assert blocks_of(model) == list(model.blocks)
    assert_same_as_plain(shake(model), cohort(RAGGED), settings=checkpointing())


# ---- that blocks run again, and what that saves


def count_calls(model: nn.Module, run: Callable[[], Any]) -> int:
    """How often blocks were called in all."""
    calls = 0

    def note(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1

    handles = [block.register_forward_pre_hook(note) for block in blocks_of(model)]
    run()
    for handle in handles:
        handle.remove()
    return calls


def one_batch(model: nn.Module, *, checkpoint: bool) -> list[Tensor]:
    settings = StepSettings(checkpoint_blocks=checkpoint, check=False)
    return fast_sum(model, cohort(ALIKE), RULE, settings=settings)


@pytest.mark.parametrize("name", ["gpt2 tied", "llama tied + lora"])
def test_every_block_runs_once_more(name: str) -> None:
    model = models_zoo.build(name)
    ordinary, more = (
        count_calls(model, lambda c=checkpoint: one_batch(model, checkpoint=c))
        for checkpoint in (False, True)
    )
    assert more - ordinary == len(blocks_of(model)) == 2


def four_blocks() -> nn.Module:
    torch.manual_seed(0)
    return models_zoo.of_family(
        "Llama",
        hidden_size=32,
        intermediate_size=128,
        num_hidden_layers=4,
        num_key_value_heads=4,
    ).eval()


WIDE = [[32] * 4] * 8


def clipping(model: nn.Module, **settings: Any) -> FastClipping:
    return FastClipping(
        model,
        trainable(model),
        RULE,
        record_loss=causal_lm_loss,
        settings=StepSettings(check=False, **settings),
    )


def saved_bytes(run: Callable[[], Any]) -> int:
    """Bytes of different memory that autograd keeps from forward to backward passes."""
    sizes: dict[int, int] = {}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        # Kept, so that no later tensor has the address.
        kept.append(tensor)
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(sizes.values())


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most memory allocated at a time, what blocks compute in their second run included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    assert profiled.profiler is not None
    results: Any = profiled.profiler.kineto_results
    changes = [event for event in results.events() if event.name() == "[memory]"]
    held = most = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        most = max(most, held)
    return most


def test_bytes_saved_for_the_backward_pass_fall() -> None:
    groups = cohort(WIDE)
    saved: list[int] = []
    for checkpoint in (False, True):
        fast = clipping(four_blocks(), checkpoint_blocks=checkpoint)
        saved.append(saved_bytes(lambda f=fast: f.clipped_sum(groups, RULE)))
    assert saved[1] < 0.25 * saved[0]


def test_peak_of_allocated_bytes_falls() -> None:
    groups = cohort(WIDE)
    peaks: list[int] = []
    for checkpoint in (False, True):
        fast = clipping(four_blocks(), checkpoint_blocks=checkpoint)
        fast.clipped_sum(groups, RULE)
        peaks.append(peak_bytes(lambda f=fast: f.clipped_sum(groups, RULE)))
    assert peaks[1] < 0.6 * peaks[0]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_input_of_a_layer_without_a_rule_is_let_go(checkpoint: bool) -> None:
    # Gemma's norms are such layers.
    model: Any = models_zoo.build("gemma")
    seen: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def note(module: nn.Module, args: Any) -> None:
        seen.append(weakref.ref(args[0]))

    for block in model.model.layers:
        block.post_attention_layernorm.register_forward_pre_hook(note)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        seen.clear()
        losses = causal_lm_loss(model, batch)
        alive[:] = [reference() is not None for reference in seen]
        return losses

    settings = StepSettings(checkpoint_blocks=checkpoint, check=False)
    fast_sum(model, cohort(ALIKE), RULE, loss, settings)
    assert len(alive) >= 2
    assert set(alive) == {not checkpoint}


@pytest.mark.parametrize("name", ["gpt2 tied", "gemma"])
def test_nothing_of_a_step_is_kept_alive_by_a_cycle(name: str) -> None:
    # What is kept is a user's gradient: it must go when the step ends, not when gc runs.
    model = models_zoo.build(name)
    seen: list[weakref.ref[Tensor]] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        seen.append(weakref.ref(hidden))

    for block in blocks_of(model):
        block.register_forward_hook(note)
    gc.collect()
    gc.disable()
    try:
        fast_sum(model, cohort(RAGGED), RULE, settings=checkpointing(check=False))
        assert seen
        assert not any(reference() is not None for reference in seen)
    finally:
        gc.enable()


# ---- the model and its caller


def flags(model: nn.Module) -> dict[str, Any]:
    return {
        name: (module.training, getattr(module, "gradient_checkpointing", None))
        for name, module in model.named_modules()
    }


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [8, 1000])
@pytest.mark.parametrize("name", NAMES)
def test_step_leaves_the_model_as_it_was(name: str, tokens: int) -> None:
    model = models_zoo.build(name)
    before = flags(model)
    groups = cohort(RAGGED, masked=name in models_zoo.MASKED)
    settings = checkpointing(microbatch_tokens=tokens)
    assert_untouched(
        model, lambda: fast_sum(model, groups, RULE, models_zoo.loss_of(name), settings)
    )
    assert flags(model) == before


def test_second_run_that_fails_leaves_the_model_as_it_was() -> None:
    model = models_zoo.build("gpt2 tied")
    first = blocks_of(model)[0]
    calls = 0

    def failing(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        # Two of the survey, the forward pass, and then the backward pass.
        if calls == 4:
            raise RuntimeError("out of memory")

    first.register_forward_pre_hook(failing)

    def run() -> None:
        with pytest.raises(RuntimeError, match="out of memory"):
            one_batch(model, checkpoint=True)

    assert_untouched(model, run)
    assert calls == 4


@pytest.mark.parametrize("checkpoint", [False, True])
def test_callers_own_checkpointing_works_as_before_and_blocks_run_twice_not_thrice(
    checkpoint: bool,
) -> None:
    model: Any = shake(models_zoo.build("llama tied"))
    model.gradient_checkpointing_enable()
    # Hugging Face's runs in training mode; this model has no dropout.
    model.train()
    before = flags(model)
    surveyed = 2 * len(blocks_of(model))

    def step() -> None:
        one_batch(model, checkpoint=checkpoint)

    assert_untouched(model, step)
    assert count_calls(model, step) == surveyed + 2 * len(blocks_of(model))
    settings = StepSettings(checkpoint_blocks=checkpoint)
    assert_same_as_plain(model, cohort(RAGGED), settings=settings)
    assert flags(model) == before
    assert model.is_gradient_checkpointing


@pytest.mark.parametrize("name", WITHOUT_BLOCKS)
def test_model_without_blocks_is_refused_before_the_first_step(name: str) -> None:
    model = models_zoo.build(name)
    with pytest.raises(InputError, match=r"has no block.*Leave checkpoint_blocks off"):
        clipping(model, checkpoint_blocks=True)
    execution = Execution(record_loss=causal_lm_loss, checkpoint_blocks=True)
    with pytest.raises(InputError, match="has no block"), execution.prepared(model):
        pass


def test_cache_of_keys_and_values_is_refused() -> None:
    # A second run would append to it.
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(input_ids=batch["input_ids"], use_cache=True).logits
        return logits.square().mean((1, 2))

    for name in ("gpt2 tied", "llama tied"):
        model = models_zoo.build(name)
        with pytest.raises(InputError, match="use_cache=False"):
            fast_sum(model, cohort(ALIKE), RULE, loss, checkpointing())


def test_classes_are_the_same_from_step_to_step() -> None:
    # Compiled blocks are found again by their class.
    model = models_zoo.build("gpt2 tied")
    seen: list[list[type]] = []
    for _ in range(2):
        with checkpointed_blocks(model):
            seen.append([type(block) for block in blocks_of(model)])
    assert seen[0] == seen[1]
    assert all(type(block) not in seen[0] for block in blocks_of(model))


# ---- compiled


def ignoring_torchs_warnings(test: Any) -> Any:
    """Warnings of torch about itself, while it traces and compiles."""
    for pattern in (
        "ignore:The .grad attribute:UserWarning",
        "ignore:.*should not be instantiated:DeprecationWarning",
        "ignore:.*torch.jit.script:DeprecationWarning",
    ):
        test = pytest.mark.filterwarnings(pattern)(test)
    return test


@contextlib.contextmanager
def compiler(backend: str) -> Iterator[None]:
    compile_ = torch.compile

    def with_backend(function: Any, **options: Any) -> Any:
        return compile_(function, backend=backend, **options)

    torch._dynamo.reset()
    execution.token_mean.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", with_backend)
        yield
    execution.token_mean.cache_clear()
    torch._dynamo.reset()


@pytest.mark.slow
@ignoring_torchs_warnings
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("aot_eager", "gpt2 tied"),
        pytest.param("aot_eager", "llama tied + lora", marks=pytest.mark.slow),
        pytest.param("inductor", "gpt2 tied", marks=pytest.mark.slow),
    ],
)
def test_compiled_and_checkpointed_blocks_give_the_plain_loops_sum(backend: str, name: str) -> None:
    with compiler(backend):
        model = shake(models_zoo.build(name))
        groups = cohort([[9, 9], [9, 2], [9, 7], [9, 9]])
        settings = checkpointing(compile_blocks=True)
        torch._dynamo.utils.counters.clear()
        assert_same_as_plain(model, groups, settings=settings)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 2
        assert not torch._dynamo.utils.counters["graph_break"]
        assert_untouched(model, lambda: fast_sum(model, groups, RULE, settings=settings))


@pytest.mark.slow
@ignoring_torchs_warnings
def test_peak_of_allocated_bytes_falls_when_compiled() -> None:
    groups = cohort(WIDE)
    peaks: list[int] = []
    for checkpoint in (False, True):
        with compiler("aot_eager"):
            fast = clipping(four_blocks(), checkpoint_blocks=checkpoint, compile_blocks=True)
            fast.clipped_sum(groups, RULE)
            peaks.append(peak_bytes(lambda f=fast: f.clipped_sum(groups, RULE)))
    assert peaks[1] < 0.6 * peaks[0]
