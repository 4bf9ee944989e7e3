"""Made-up values keep the layout of a batch and none of its values."""

from __future__ import annotations

import math

import torch
from comparing import RAGGED, cohort

from userdp.clipping.batches.equal import pack_equal
from userdp.clipping.batches.joined_records import joined
from userdp.clipping.batches.ragged import Sizes, pack_ragged
from userdp.clipping.batches.users import Users
from userdp.clipping.checks.made_up import MadeUp, disguised, own_groups, row_ends


def packed(groups: list[dict[str, torch.Tensor]]) -> list[Users]:
    sizes = Sizes(max_tokens=80)
    sizes.see(groups)
    return [*pack_equal(groups, max_tokens=400, ladder=True), *pack_ragged(groups, sizes)]


def test_disguise_keeps_lengths_labels_and_weights_and_changes_the_tokens() -> None:
    for users in packed([group for group in cohort(RAGGED) if len(group["labels"])]):
        found = disguised(users)
        assert found.shape == users.shape
        assert torch.equal(found.weights, users.weights)
        assert torch.equal(row_ends(found.batch), row_ends(users.batch))
        labelled = users.batch["labels"] != -100
        assert torch.equal(found.batch["labels"] != -100, labelled)
        if int(labelled.sum()) > 20:
            same = found.batch["input_ids"][labelled] == users.batch["input_ids"][labelled]
            assert float(same.float().mean()) < 0.5


def test_disguise_leaves_no_number_with_a_fraction() -> None:
    values = torch.full((6, 3), 1e25)
    users = Users(batch={"x": values}, weights=torch.ones(6, dtype=torch.float64), count=6)
    found = disguised(users).batch["x"]
    assert found.dtype == values.dtype
    assert float(found.abs().max()) < 10


def test_a_made_up_user_has_one_class() -> None:
    labels = torch.tensor([0, 1, 1, 0, 2, 2, 0, 1])
    batch = {"x": torch.randn(8, 3), "labels": labels}
    users = Users(batch=batch, weights=torch.full((8,), 0.5, dtype=torch.float64), count=4)
    drawn = [disguised(users, seed=seed).batch["labels"].view(4, 2) for seed in range(8)]
    drawn += [MadeUp.like(batch).group(2, 1, seed=seed)["labels"][None] for seed in range(8)]
    assert all(torch.equal(first, second) for first, second in (d.unbind(1) for d in drawn))
    assert torch.cat(drawn).unique().tolist() == [0, 1, 2]


def test_own_groups_are_what_was_packed_without_the_padding_of_others() -> None:
    # Own padding stays: a user's rows are as long as its longest record.
    groups = cohort([[5, 9, 3], [4], [7, 7], [12]])
    for group in groups:
        group["attention_mask"] = (group["labels"] != -100).long()
    (users,) = pack_equal(groups, max_tokens=10_000, ladder=True)
    found = own_groups(users, range(len(groups)))
    by_shape = {tuple(group["labels"].shape): group for group in groups}
    for own in found:
        expected = by_shape[tuple(own["labels"].shape)]
        assert all(torch.equal(own[name], expected[name]) for name in expected)


def test_own_groups_of_joined_records_are_separate_again() -> None:
    (group,) = cohort([[5, 9, 3]])
    together = joined(group, 32)
    users = Users(
        batch=together, weights=torch.ones(len(together["labels"]), dtype=torch.float64), count=1
    )
    (own,) = own_groups(users, [0])
    assert sorted(row_ends(own).tolist()) == [3, 5, 9]


def test_made_up_groups_have_the_tensors_of_the_example() -> None:
    example = {
        "input_ids": torch.tensor([[4, 7, 9]]),
        "labels": torch.tensor([[4, -100, 9]]),
        "attention_mask": torch.tensor([[1, 1, 0]]),
        "x": torch.full((1, 2), math.nan),
        "kind": torch.tensor([3]),
    }
    group = MadeUp.like(example).group(5, 8, seed=1)
    assert {n: tuple(t.shape) for n, t in group.items()} == {
        "input_ids": (5, 8),
        "labels": (5, 8),
        "attention_mask": (5, 8),
        "x": (5, 2),
        "kind": (5,),
    }
    assert set(group["input_ids"].unique().tolist()) == {4, 7, 9}
    assert set(group["labels"].unique().tolist()) == {4, 9}
    assert bool(group["attention_mask"].all())
    assert bool(group["x"].isfinite().all())
    assert bool((group["kind"] == 3).all())
