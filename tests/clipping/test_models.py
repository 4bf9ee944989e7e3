"""What the fast path knows of Hugging Face models: masks, heads, positions."""

from __future__ import annotations

from typing import Any, cast

import pytest
from torch import nn

import models_zoo
from userdp.clipping.execute import execution
from userdp.clipping.execute.models import has_aligned_head, head_padding
from userdp.losses import causal_lm_loss


def test_head_counts_as_aligned_only_where_it_is_padded() -> None:
    # Grouped products on CUDA refuse other widths. 23 tokens; padded if no mask is needed.
    model = models_zoo.build("gpt2 tied")
    assert has_aligned_head(model, causal_lm_loss)
    assert not has_aligned_head(model, lambda model, batch: causal_lm_loss(model, batch))
    # Rows may be longer than a window of attention: then there is a mask.
    cast(Any, model).config.window_size = 8
    assert not has_aligned_head(model, causal_lm_loss)
    assert has_aligned_head(models_zoo.build("gpt2 untied"), causal_lm_loss)
    assert not has_aligned_head(models_zoo.build("lstm tied"), causal_lm_loss)


def test_vocabulary_of_unaligned_width_is_padded_in_the_head_alone() -> None:
    model = models_zoo.build("gpt2 tied")
    assert head_padding(model) == 64 - models_zoo.VOCABULARY
    chosen = chosen_execution(model, 9)
    assert chosen.head_padding == 64 - models_zoo.VOCABULARY
    aligned = models_zoo.gpt2(vocabulary=64)
    assert head_padding(aligned) == 0


def chosen_execution(model: nn.Module, length: int) -> execution.Execution:
    return execution.Execution.choose(
        model, causal_lm_loss, length=length, compute_dtype=None, compile_blocks=True
    )


@pytest.mark.parametrize(
    ("name", "length", "skips"),
    [
        ("gpt2 tied", 9, True),
        ("llama tied + lora", 9, True),
        ("mistral", 9, True),
        ("mistral", 5000, False),
        ("bert", 9, False),
        ("lstm", 9, False),
    ],
)
def test_mask_is_left_out_only_where_attention_is_plainly_causal(
    name: str, length: int, skips: bool
) -> None:
    assert chosen_execution(models_zoo.build(name), length).skip_mask is skips
