"""Packing ragged groups: every record once with its weight, and padding that weighs nothing."""

from __future__ import annotations

from collections import Counter

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from userdp.clipping.batches.equal import MOST_PADDING, ladder_step, pack_equal
from userdp.clipping.batches.users import PADDING, Users, size_of
from userdp.losses import IGNORED_LABEL

GROUPS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 40), st.sampled_from([None, 1, 2])), max_size=25
)


def make(sizes: list[tuple[int, int, int | None]]) -> list[dict[str, Tensor]]:
    """Groups of (records, tokens, width of a tensor that cannot be padded), tokens all distinct."""
    groups: list[dict[str, Tensor]] = []
    start = 1
    for rows, length, width in sizes:
        ids = torch.arange(start, start + rows * length).view(rows, length)
        start += rows * length
        group = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
        if width is not None:
            group["picture"] = torch.full((rows, width), float(len(groups)))
        groups.append(group)
    return groups


def real_rows(users: Users) -> list[tuple[int, int]]:
    """(user, row) of every row with a weight."""
    return [divmod(row, users.rows) for row in users.weights.nonzero().flatten().tolist()]


@hypothesis.given(
    sizes=GROUPS,
    max_tokens=st.integers(1, 400),
    ladder=st.booleans(),
    max_users=st.none() | st.integers(1, 5),
)
@hypothesis.settings(max_examples=200)
def test_every_record_is_packed_once_with_the_weight_of_its_group(
    sizes: list[tuple[int, int, int | None]], max_tokens: int, ladder: bool, max_users: int | None
) -> None:
    groups = make(sizes)
    owner = {
        int(row[0]): number for number, group in enumerate(groups) for row in group["input_ids"]
    }
    seen: Counter[int] = Counter()
    for users in pack_equal(groups, max_tokens=max_tokens, ladder=ladder, max_users=max_users):
        ids = users.batch["input_ids"]
        of_user: dict[int, set[int]] = {}
        for user, row in real_rows(users):
            place = user * users.rows + row
            first = int(ids[place, 0])
            group = groups[owner[first]]
            number = int((group["input_ids"][:, 0] == first).nonzero())
            length = group["input_ids"].shape[1]
            assert float(users.weights[place]) == 1 / len(group["input_ids"])
            for name, tensor in group.items():
                packed = users.batch[name][place]
                if name in PADDING:
                    assert torch.equal(packed[:length], tensor[number])
                    assert bool((packed[length:] == PADDING[name]).all())
                else:
                    assert torch.equal(packed, tensor[number])
            seen[first] += 1
            of_user.setdefault(user, set()).add(owner[first])
        # A user's rows are those of one group, and no group is two users.
        assert all(len(found) == 1 for found in of_user.values())
        assert len(of_user) == len({next(iter(found)) for found in of_user.values()})
        # A group is never cut: its weights add up to one.
        totals = users.weights.view(users.count, -1).sum(1)
        assert all(min(abs(t), abs(t - 1)) < 1e-12 for t in totals.tolist())
        padding = users.weights == 0
        assert bool((users.batch["labels"][padding] == IGNORED_LABEL).all())
        # A mean over no place would be no number.
        assert bool((users.batch["attention_mask"][padding, 0] == 1).all())
        assert bool((users.batch["attention_mask"][padding, 1:] == 0).all())
    assert seen == Counter(owner.keys())


@hypothesis.given(
    sizes=GROUPS,
    max_tokens=st.integers(1, 400),
    ladder=st.booleans(),
    max_users=st.none() | st.integers(1, 5),
)
def test_batches_stay_within_the_budget_unless_they_hold_one_group(
    sizes: list[tuple[int, int, int | None]], max_tokens: int, ladder: bool, max_users: int | None
) -> None:
    for users in pack_equal(make(sizes), max_tokens=max_tokens, ladder=ladder, max_users=max_users):
        assert users.count == 1 or users.batch["input_ids"].numel() <= max_tokens
        assert max_users is None or users.count <= max_users


@hypothesis.given(sizes=GROUPS, max_tokens=st.integers(1, 400))
def test_without_a_ladder_no_group_is_padded_beyond_half_of_its_own_tokens(
    sizes: list[tuple[int, int, int | None]], max_tokens: int
) -> None:
    groups = make(sizes)
    tokens = {int(row[0]): g["input_ids"].numel() for g in groups for row in g["input_ids"]}
    for users in pack_equal(groups, max_tokens=max_tokens, ladder=False):
        ids = users.batch["input_ids"].view(users.count, -1)
        assert all(ids.shape[1] <= MOST_PADDING * tokens[int(first)] for first in ids[:, 0])


@hypothesis.given(sizes=GROUPS, max_tokens=st.integers(1, 400))
def test_ladder_gives_few_shapes(sizes: list[tuple[int, int, int | None]], max_tokens: int) -> None:
    for users in pack_equal(make(sizes), max_tokens=max_tokens, ladder=True):
        length = users.batch["input_ids"].shape[1]
        assert users.rows == ladder_step(users.rows)
        assert length == 1 or (length >= 16 and length == ladder_step(length))
        # Users too, unless the budget holds no such number of them.
        limit = max(1, max_tokens // (users.rows * length))
        assert users.count == limit or users.count == ladder_step(users.count)


@hypothesis.given(number=st.integers(1, 100_000))
def test_ladder_step_is_the_next_of_a_list_that_grows_by_a_third_or_a_half(number: int) -> None:
    steps = sorted({1 << k for k in range(18)} | {3 << k for k in range(17)})
    assert ladder_step(number) == next(step for step in steps if step >= number)


@hypothesis.given(sizes=GROUPS, ladder=st.booleans())
def test_groups_whose_other_tensors_differ_in_shape_never_share_a_batch(
    sizes: list[tuple[int, int, int | None]], ladder: bool
) -> None:
    for users in pack_equal(make(sizes), max_tokens=10_000, ladder=ladder):
        picture = users.batch.get("picture")
        if picture is not None:
            assert bool((picture[:, :1] == picture).all())
    shapes = [
        users.batch["picture"].shape[1] if "picture" in users.batch else None
        for users in pack_equal(make(sizes), max_tokens=10_000, ladder=ladder)
    ]
    assert set(shapes) == {width for rows, _, width in sizes if rows}


def test_groups_without_text_are_batched_with_their_like() -> None:
    groups = [{"x": torch.randn(rows, 3)} for rows in (1, 2, 2, 4)]
    packed = list(pack_equal(groups, max_tokens=100, ladder=False))
    assert sum(users.count for users in packed) == 4
    assert all(users.batch["x"].shape[1:] == (3,) for users in packed)


@pytest.mark.parametrize("ladder", [False, True])
def test_nothing_to_pack_gives_no_batch(ladder: bool) -> None:
    assert list(pack_equal([], max_tokens=10, ladder=ladder)) == []
    assert list(pack_equal(make([(0, 5, None)]), max_tokens=10, ladder=ladder)) == []


def test_size_of_a_group_is_its_rows_and_its_longest_row() -> None:
    (group,) = make([(3, 7, 2)])
    size = size_of(group)
    assert (size.rows, size.length, size.tokens) == (3, 7, 21)
    assert size.rest == (("picture", (2,)),)
