"""Which form a gradient is handed out in."""

from __future__ import annotations

from typing import Any, cast

import pytest
from comparing import (
    RAGGED,
    cohort,
    trainable,
)

import models_zoo
from userdp.clipping.batches.ragged import Sizes, pack_ragged
from userdp.clipping.execute.execution import Execution
from userdp.clipping.gradients import many_users, probes
from userdp.clipping.gradients.probes import pair_is_cheaper
from userdp.clipping.rules import (
    FlatClip,
)
from userdp.losses import causal_lm_loss


@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs", "expected"),
    [
        (128, 1024, [4096], True),
        (1024, 1024, [4096], False),
        (512, 1024, [1024], False),
        (512, 1024, [50304], True),
        # A pair would be the larger.
        (100, 64, [50304], False),
    ],
)
def test_pairs_are_chosen_where_they_are_cheaper(
    tokens: int, inputs: int, outputs: list[int], expected: bool
) -> None:
    assert pair_is_cheaper(tokens, inputs, outputs) == expected


@pytest.mark.parametrize("padding", [0, 41])
def test_head_aligned_by_padding_is_stored_by_user(
    padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By row, a vocabulary of 32,001 would be stored a hundred times for a dozen users.
    monkeypatch.setattr(probes, "MOST_VALUES_BY_ROW", 0)
    model = models_zoo.build("gpt2 untied")
    (users,) = pack_ragged(cohort(RAGGED[:2]), Sizes(max_tokens=400))
    execution = Execution(record_loss=causal_lm_loss, head_padding=padding)
    rule = FlatClip(clip_norm=1.0)
    fast = many_users.ManyUsers(model, trainable(model), rule, users, execution=execution)
    head = cast(Any, model).lm_head.weight
    assert fast._probes.is_stored_by_user(head) == (padding > 0)
