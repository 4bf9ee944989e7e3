"""A cohort into batches: who shares one, and whose records are joined."""

from __future__ import annotations

import pytest
import torch
from comparing import (
    assert_same_as_plain,
    cohort,
    shake,
)
from test_joined_records import clipping_of, tokens_run
from torch import Tensor, nn

import models_zoo
from userdp.clipping.batches.joined_records import (
    is_joined,
    worth_joining,
)
from userdp.clipping.fast import FastClipping
from userdp.clipping.rules import FlatClip
from userdp.clipping.settings import StepSettings


@pytest.mark.parametrize("mix_sizes", [False, True])
def test_groups_with_unlike_tensors_go_into_batches_of_their_own(mix_sizes: bool) -> None:
    # What one user's batch has beside the others' must not stop the run.
    model = shake(models_zoo.build("gpt2 tied"))
    groups = cohort([[4, 4], [5], [6, 3], [5]])
    for odd in groups[1::2]:
        odd["attention_mask"] = torch.ones_like(odd["labels"])
    assert_same_as_plain(model, groups, settings=StepSettings(mix_sizes=mix_sizes))


def test_rows_that_are_no_sequences_are_not_mixed_unless_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A batch of few shapes has thousands of rows where a row counts as one token.
    model = nn.Linear(3, 1)
    groups = [{"x": torch.randn(rows, 3)} for rows in (1, 2, 2)]
    rule = FlatClip(clip_norm=0.3)
    sizes: list[int] = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[type-arg]
        sizes.append(len(batch["x"]))
        return model(batch["x"])[:, 0] ** 2

    fast = FastClipping(
        model,
        list(model.parameters()),
        rule,
        record_loss=loss,  # type: ignore[arg-type]
    )
    # As on CUDA in bfloat16.
    monkeypatch.setattr(fast._packing, "ragged", True)
    fast.clipped_sum(groups, rule)
    assert max(sizes) <= 8


def test_each_user_is_joined_if_that_saves_this_user_much_whoever_else_is_there() -> None:
    fast, rule = clipping_of("llama"), FlatClip(clip_norm=0.5)
    even, uneven = cohort([[9, 9], [12], [5, 5, 5]]), cohort([[14, 2, 2, 2], [2, 13, 3]])
    assert not any(worth_joining(group, "cpu") for group in even)
    assert all(worth_joining(group, "cpu") for group in uneven)
    # 70% full: on CUDA full rows of one length run that much faster.
    (mostly_full,) = cohort([[10, 4]])
    assert worth_joining(mostly_full, "cpu")
    assert not worth_joining(mostly_full, "cuda")
    # There a lone short record joins those of others: its rows would need a shape of their own.
    lone, full = cohort([[12], [16, 16]])
    assert worth_joining(lone, "cuda", sequence_length=32)
    assert not worth_joining(lone, "cpu", sequence_length=32)
    assert not worth_joining(full, "cuda", sequence_length=16)
    # A small user is joined where groups may be large, by public numbers.
    for user, joins in ((full, True), (cohort([[272] * 2])[0], False)):
        assert worth_joining(user, "cuda", sequence_length=272, group_size=2) is joins
        assert worth_joining(user, "cpu", sequence_length=272, group_size=2) is False
    # There every user is, if records are short.
    for user in (full, cohort([[16] * 33])[0]):
        assert worth_joining(user, "cuda", sequence_length=16, group_size=33)
        assert not worth_joining(user, "cuda", sequence_length=16, group_size=32)
        assert not worth_joining(user, "cpu", sequence_length=16, group_size=33)
    for groups, joined_rows in ((even, {False}), (uneven, {True}), (even + uneven, {False, True})):
        batches = tokens_run(fast, groups, rule)
        assert {is_joined(users.batch) for users in batches} == joined_rows
    # Nothing of the uneven users is remembered.
    assert not any(is_joined(users.batch) for users in tokens_run(fast, even, rule))
