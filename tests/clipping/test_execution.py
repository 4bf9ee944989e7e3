"""Compiled blocks, the padded head and attention without a mask give the same sum.

On the CPU, with the compiler's back end left out: what is traced is what CUDA compiles.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    squares_wherever_possible,
)
from test_model_untouched import assert_untouched
from torch import nn

import models_zoo
from userdp.clipping.execute import execution
from userdp.clipping.fast import FastClipping
from userdp.clipping.gradients import probes
from userdp.clipping.rules import FlatClip
from userdp.clipping.settings import StepSettings
from userdp.losses import causal_lm_loss

# Warnings of torch about itself, while it traces.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

COMPILED = StepSettings(compile_blocks=True)


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """torch.compile without code generation."""
    compile_ = torch.compile
    traced: list[Any] = []

    def traced_compile(function: Any, **options: Any) -> Any:
        traced.append(function)
        return compile_(function, backend="aot_eager", **options)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    forget_losses()
    monkeypatch.setattr(torch, "compile", traced_compile)
    yield traced
    forget_losses()
    torch._dynamo.reset()


def forget_losses() -> None:
    execution.token_mean.cache_clear()
    execution.token_sum.cache_clear()


LENGTHS = [[5, 9], [9, 2], [], [9, 7], [9, 9]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2 tied", "llama tied", "gpt2 + lora"])
def test_compiled_blocks_give_the_plain_loops_sum_without_graph_breaks(
    name: str, traced_only: list[Any]
) -> None:
    model = shake(models_zoo.build(name))
    assert_same_as_plain(model, cohort(LENGTHS), settings=COMPILED)
    # Both blocks, what lies outside them, and the loss.
    assert len(traced_only) > 2
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("mix_sizes", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiled_products_that_give_their_norms_need_no_graph_break(
    mix_sizes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "MOST_VALUES_BY_ROW", 0)
    model = shake(models_zoo.build("gpt2 tied"))
    settings = StepSettings(compile_blocks=True, mix_sizes=mix_sizes, microbatch_tokens=400)
    with squares_wherever_possible():
        assert_same_as_plain(model, cohort(LENGTHS), settings=settings)
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("gpt2 tied", [[5, 3, 4], [4], [6, 2]]),
        pytest.param("gpt2 tied", RAGGED, marks=pytest.mark.slow),
        pytest.param("llama tied + lora", RAGGED, marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_give_the_plain_loops_sum_of_joined_records(
    name: str, lengths: list[list[int]], traced_only: list[Any]
) -> None:
    model = shake(models_zoo.build(name))
    settings = StepSettings(compile_blocks=True, join_records=True)
    assert_same_as_plain(model, cohort(lengths), settings=settings)
    assert not torch._dynamo.utils.counters["graph_break"]
    # The comparison and the sum ran the same calls: torch was asked once for each module.
    calls = [(id(f.__self__), f.__func__) for f in traced_only if hasattr(f, "__self__")]
    assert len(calls) == len(set(calls)) > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma", pytest.param("opt", marks=pytest.mark.slow), "bert"])
def test_compiled_blocks_give_the_plain_loops_sum_for_layers_without_a_rule_and_others(
    name: str,
) -> None:
    # Gemma's head shares its weight with an embedding that has no rule; its width is unaligned.
    model = shake(models_zoo.build(name, torch.float32))
    groups = cohort(LENGTHS, masked=name in models_zoo.MASKED)
    assert_same_as_plain(model, groups, record_loss=models_zoo.loss_of(name), settings=COMPILED)


@pytest.mark.slow
def test_compiled_pairs_give_the_plain_loops_sum() -> None:
    with pairs_wherever_possible():
        model = shake(models_zoo.build("gpt2 tied"))
        assert_same_as_plain(model, cohort(LENGTHS), settings=COMPILED)


@pytest.mark.slow
def test_compiled_user_in_pieces_gives_the_plain_loops_sum() -> None:
    model = shake(models_zoo.build("gpt2 tied"))
    settings = StepSettings(compile_blocks=True, microbatch_tokens=10)
    assert_same_as_plain(model, cohort([[9, 9, 9], [5, 6], [9]]), settings=settings)


@pytest.mark.parametrize(
    "name", ["gpt2 tied", pytest.param("llama tied + lora", marks=pytest.mark.slow)]
)
def test_compiled_step_leaves_the_model_as_it_was(name: str) -> None:
    model = models_zoo.build(name)
    rule = FlatClip(clip_norm=0.5)
    assert_untouched(model, lambda: fast_sum(model, cohort(LENGTHS), rule, settings=COMPILED))


def test_a_module_the_caller_compiled_stays_compiled() -> None:
    model: Any = models_zoo.build("gpt2 tied")
    block = model.transformer.h[0]
    block.compile(dynamic=False)
    own = block._compiled_call_impl
    with execution.compiled_blocks(model, any_rows=False):
        assert block._compiled_call_impl is not own
    assert block._compiled_call_impl is own


@pytest.mark.slow
def test_head_that_a_loss_of_ones_own_leaves_unpadded_goes_into_a_sum_with_room() -> None:
    def own_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return 2 * causal_lm_loss(model, batch)

    model = shake(models_zoo.build("gpt2 untied"))
    with pairs_wherever_possible():
        for lengths in ([[5]] * 4, LENGTHS):
            assert_same_as_plain(model, cohort(lengths), record_loss=own_loss, settings=COMPILED)


@pytest.mark.slow
def test_padded_head_has_room_in_the_sum_and_leaves_nothing_there() -> None:
    model: Any = models_zoo.build("gpt2 untied")
    rule = FlatClip(clip_norm=0.5)
    parameters = [p for p in model.parameters() if p.requires_grad]
    fast = FastClipping(model, parameters, rule, record_loss=causal_lm_loss, settings=COMPILED)
    fast._total.values.fill_(torch.nan)
    total = fast.clipped_sum(cohort(LENGTHS), rule).total
    place = next(i for i, p in enumerate(parameters) if p is model.lm_head.weight)
    assert len(total.views[place]) == models_zoo.VOCABULARY
    assert len(total.roomy[place]) == 64
    assert total.views[place].any()
    assert not total.roomy[place][models_zoo.VOCABULARY :].any()
