"""Out of memory: the cohort is added up again in smaller batches, and the sum is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import cohort, difference, middle_clip, plain_sum, trainable
from torch import nn

import models_zoo
from userdp.clipping.batches.users import Users
from userdp.clipping.fast import FastClipping
from userdp.clipping.rules import FlatClip
from userdp.clipping.settings import StepSettings
from userdp.losses import causal_lm_loss

LENGTHS = [[5, 9], [7], [3, 4, 8], [9], [6, 2], [4]] * 3


def with_room_for(
    tokens: int, model: nn.Module, rule: FlatClip, monkeypatch: pytest.MonkeyPatch
) -> FastClipping:
    """The fast path on a device that runs out of memory above this many tokens a batch."""
    settings = StepSettings(microbatch_tokens=256, join_records=False)
    fast = FastClipping(
        model, trainable(model), rule, record_loss=causal_lm_loss, settings=settings
    )
    add = fast._add_users

    def limited(users: Users, make: Any) -> None:
        add(users, make)
        if users.batch["input_ids"].numel() > tokens:
            raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(fast, "_add_users", limited)
    return fast


@pytest.mark.parametrize("room", [128, 40])
def test_smaller_batches_give_the_same_sum(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = models_zoo.gpt2().double().eval()
    groups = cohort(LENGTHS)
    rule = FlatClip(clip_norm=middle_clip(model, groups))
    fast = with_room_for(room, model, rule, monkeypatch)
    found = fast.clipped_sum(groups, rule)
    assert difference(found.total.views, plain_sum(model, groups, rule)) < 1e-10
    assert 0 < int(found.num_within) < len(groups)
    assert found.num_updates == len(groups)
    assert fast.state_dict()["packing"]["max_tokens"] <= 2 * room
    # The size stays, and goes with a checkpoint.
    again = FastClipping(model, trainable(model), rule, record_loss=causal_lm_loss)
    again.load_state_dict(fast.state_dict())
    assert again.state_dict() == fast.state_dict()


def test_a_row_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models_zoo.gpt2().eval()
    rule = FlatClip(clip_norm=1.0)
    fast = with_room_for(1, model, rule, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        fast.clipped_sum(cohort(LENGTHS), rule)
