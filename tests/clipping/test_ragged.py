"""Users of unlike size in batches of few shapes: everybody once, and the plain loop's sum."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
import transformers
from comparing import (
    RAGGED,
    assert_same_as_plain,
    cohort,
    difference,
    fast_sum,
    middle_clip,
    pairs_wherever_possible,
    plain_sum,
    shake,
    squares_wherever_possible,
    trainable,
)
from hypothesis import strategies as st
from torch import Tensor, nn

import models_zoo
from userdp.clipping.batches.equal import pack_equal
from userdp.clipping.batches.ragged import Sizes, pack_ragged
from userdp.clipping.batches.users import Users
from userdp.clipping.fast import FastClipping
from userdp.clipping.gradients import probes
from userdp.clipping.plain import PlainClipping
from userdp.clipping.rules import AutomaticClip, ClipRule, FlatClip, NormalisedClip, PerLayerClip
from userdp.clipping.settings import StepSettings
from userdp.losses import IGNORED_LABEL, causal_lm_loss

ZOO = [*models_zoo.BUILDERS, *models_zoo.MORE_BUILDERS]
MIXED = StepSettings(mix_sizes=True, microbatch_tokens=400)


@contextlib.contextmanager
def users_gradients_formed() -> Iterator[None]:
    """Grouped products for every weight that can have them; small ones are stored by row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "MOST_VALUES_BY_ROW", 0)
        patch.setattr(probes, "is_aligned", lambda weight, padding: True)
        yield


@contextlib.contextmanager
def users_gradients_squared() -> Iterator[None]:
    """Grouped products, and their norms with them."""
    with users_gradients_formed(), squares_wherever_possible():
        yield


FORMS = {
    "by row": contextlib.nullcontext,
    "by user": users_gradients_formed,
    "squared": users_gradients_squared,
    "squared by row": squares_wherever_possible,
    "pairs": pairs_wherever_possible,
}


# ---- packing


def groups_of(lengths: list[list[int]]) -> list[dict[str, Tensor]]:
    """Every token another number, so that it can be found again."""
    groups: list[dict[str, Tensor]] = []
    count = 1
    for records in lengths:
        ids = torch.zeros(len(records), max(records), dtype=torch.int64)
        labels = torch.full_like(ids, IGNORED_LABEL)
        for row, length in enumerate(records):
            ids[row, :length] = torch.arange(count, count + length)
            labels[row, :length] = ids[row, :length]
            count += length
        groups.append({"input_ids": ids, "labels": labels})
    return groups


def records_by_user(users: Users) -> list[tuple[float, list[list[int]]]]:
    """The weight of a user's records and their labelled tokens, for users that have any."""
    found: list[tuple[float, list[list[int]]]] = []
    for user in range(users.count):
        start, stop = users.rows_of(user)
        own = [row for row in range(start, stop) if users.weights[row] > 0]
        assert own == list(range(start, start + len(own)))
        if own:
            weights = {float(users.weights[row]) for row in own}
            assert len(weights) == 1
            labels = [users.batch["labels"][row] for row in own]
            found.append((weights.pop(), [r[r != IGNORED_LABEL].tolist() for r in labels]))
    return found


COHORTS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=30)


@hypothesis.given(lengths=COHORTS, max_tokens=st.integers(384, 3000))
def test_every_group_is_in_one_batch_whole_and_with_its_weight(
    lengths: list[list[int]], max_tokens: int
) -> None:
    groups = groups_of(lengths)
    sizes = Sizes(max_tokens=max_tokens)
    batches = list(pack_ragged(groups, sizes))
    found = sorted((one for users in batches for one in records_by_user(users)), key=lambda o: o[1])
    expected = [
        (1 / len(group["labels"]), [r[r != IGNORED_LABEL].tolist() for r in group["labels"]])
        for group in groups
    ]
    assert found == sorted(expected, key=lambda o: o[1])
    for users in batches:
        assert users.batch["input_ids"].numel() <= max_tokens
        padding = users.weights == 0
        assert bool((users.batch["labels"][padding] == IGNORED_LABEL).all())


# Its rows of padding cannot be shared out equally among the places that are left.
@hypothesis.example(lengths=[[6]], max_users=2)
@hypothesis.given(lengths=COHORTS, max_users=st.none() | st.integers(2, 9))
def test_every_row_is_somebodys_and_users_come_before_empty_places(
    lengths: list[list[int]], max_users: int | None
) -> None:
    sizes = Sizes(max_tokens=512, max_users=max_users, max_short_users=max_users)
    for users in pack_ragged(groups_of(lengths), sizes):
        if users.ranges is None:
            continue
        counts = users.ranges.starts.diff()
        assert int(users.ranges.starts[0]) == 0
        assert int(users.ranges.starts[-1]) == len(users.weights)
        assert int(counts.max()) <= users.ranges.most_rows
        filled = (counts > 0).nonzero().flatten()
        assert filled.tolist() == list(range(len(filled)))
        owner = torch.repeat_interleave(torch.arange(users.count), counts.long())
        assert torch.equal(owner, users.ranges.user_of_row)
        # Padding has places of its own.
        by_user = [users.weights[slice(*users.rows_of(user))] for user in range(len(filled))]
        assert all(bool((w > 0).all()) or not bool(w.any()) for w in by_user)
        if users.ranges.fewest_rows == 1:
            # Small users' padding is spread over all places that are left.
            empty = [len(w) for w in by_user if not bool(w.any())]
            free = users.count - (len(by_user) - len(empty))
            assert not empty or max(empty) == -(-sum(empty) // free)


def test_places_do_not_run_out_before_rows() -> None:
    # The large user's kind has 33 places in 128 rows, and of the smaller ones 32 share its batch.
    groups = groups_of([[64] * 16, *[[64] * 3] * 40])
    batches = list(pack_ragged(groups, Sizes(max_tokens=128 * 64)))
    rows = [len(users.weights) for users in batches]
    used = [int((users.weights > 0).sum()) for users in batches]
    assert sum(used) == 16 + 3 * 40
    assert used[0] > 100
    assert rows[0] - used[0] <= 16
    assert sum(rows) <= 128 + 32


@pytest.mark.parametrize("mean", [64, 500])
def test_ragged_cohorts_are_packed_densely_into_few_shapes(mean: int) -> None:
    # Users with a heavy tail of rows, at most 16 of them, of which the last is cut short.
    rng = np.random.default_rng(0)
    sizes = Sizes(max_tokens=16_384)
    useful, total, shapes = 0, 0, set()
    for _ in range(10):
        lengths: list[list[int]] = []
        for rows in np.clip(rng.lognormal(3.0, 1.0, rng.poisson(mean)).astype(int), 1, 16):
            lengths.append([128] * (rows - 1) + [int(rng.integers(2, 129))])
        for users in pack_ragged(groups_of(lengths), sizes):
            total += users.batch["labels"].numel()
            useful += int((users.batch["labels"] != IGNORED_LABEL).sum())
            shapes.add(users.shape)
    assert useful >= 0.9 * total
    assert len(shapes) <= 16


# ---- sums


def in_forms(name: str) -> list[Any]:
    """Every form of the models with the usual layers; of the others, two by default."""
    few = ("by row", "pairs") if name in models_zoo.MORE_BUILDERS else tuple(FORMS)
    return [
        pytest.param(name, forms, marks=() if forms in few else pytest.mark.slow) for forms in FORMS
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "forms"), [case for name in ZOO for case in in_forms(name)])
def test_mixed_batches_give_the_plain_loops_sum(name: str, forms: str) -> None:
    model = shake(models_zoo.build(name))
    groups = cohort(RAGGED, masked=name in models_zoo.MASKED)
    # Gemma's norm computes in float32 even in a float64 model.
    tolerance = 1e-7 if name == "gemma" else None
    with FORMS[forms]():
        assert_same_as_plain(
            model,
            groups,
            record_loss=models_zoo.loss_of(name),
            settings=MIXED,
            tolerance=tolerance,
        )


@pytest.mark.slow
@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize(
    "rule",
    [PerLayerClip(clip_norm=1.0), NormalisedClip(clip_norm=0.7), AutomaticClip()],
    ids=str,
)
@pytest.mark.parametrize("name", ["gpt2 tied", "llama tied and trained + lora"])
def test_every_clip_rule_gives_the_plain_loops_sum(name: str, rule: ClipRule, forms: str) -> None:
    with FORMS[forms]():
        assert_same_as_plain(
            shake(models_zoo.build(name)), cohort(RAGGED), rule=rule, settings=MIXED
        )


@pytest.mark.slow
@hypothesis.given(
    lengths=st.lists(st.lists(st.integers(2, 14), max_size=5), min_size=2, max_size=9).filter(any),
    tokens=st.integers(80, 500),
    forms=st.sampled_from(list(FORMS)),
    name=st.sampled_from(["gpt2 tied", "gpt2 untied", "llama tied", "llama tied + lora"]),
)
@hypothesis.settings(max_examples=40)
def test_any_cohort_gives_the_plain_loops_sum(
    lengths: list[list[int]], tokens: int, forms: str, name: str
) -> None:
    model = shake(models_zoo.build(name))
    with FORMS[forms]():
        assert_same_as_plain(
            model,
            cohort(lengths),
            rule=FlatClip(clip_norm=0.5),
            settings=StepSettings(mix_sizes=True, microbatch_tokens=tokens),
        )


def test_merged_adapters_and_users_larger_than_a_batch() -> None:
    model = shake(models_zoo.build("llama tied + lora"))
    groups = cohort([[30] * 20, [30], [5, 6], [20, 10, 30]])
    settings = StepSettings(mix_sizes=True, merge_lora=True, microbatch_tokens=256)
    assert_same_as_plain(model, groups, settings=settings)


def test_updates_within_the_clip_norm_are_counted_alike() -> None:
    model = shake(models_zoo.build("gpt2 tied"))
    groups = cohort([*RAGGED, [30] * 5])
    rule = FlatClip(clip_norm=middle_clip(model, groups))
    plain = PlainClipping(model, trainable(model), record_loss=causal_lm_loss)
    expected = plain.clipped_sum(groups, rule)
    fast = FastClipping(model, trainable(model), rule, record_loss=causal_lm_loss, settings=MIXED)
    found = fast.clipped_sum(groups, rule)
    assert 1 < int(expected.num_within) < len(groups) - 1
    assert int(found.num_within) == int(expected.num_within)


def test_rows_that_cannot_be_padded_are_batched_with_their_like() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    groups = [{"x": torch.randn(rows, 3).double()} for rows in (1, 4, 2, 2, 3, 1)]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[type-arg]
        return model(batch["x"])[:, 0] ** 2

    rule = FlatClip(clip_norm=0.3)
    settings = StepSettings(mix_sizes=True, microbatch_tokens=8)
    found = fast_sum(model, groups, rule, loss, settings)  # type: ignore[arg-type]
    assert difference(found, plain_sum(model, groups, rule, loss)) <= 1e-12  # type: ignore[arg-type]


@pytest.mark.parametrize("ladder", [False, True])
def test_rows_are_not_padded_beyond_the_models_positions(ladder: bool) -> None:
    groups = groups_of([[12, 3], [12], [9, 9, 9]])
    if ladder:
        batches = list(pack_equal(groups, max_tokens=400, ladder=True, max_length=12))
    else:
        batches = list(pack_ragged(groups, Sizes(max_tokens=400, max_length=12)))
    assert {users.batch["input_ids"].shape[1] for users in batches} == {12}


def test_model_with_just_as_many_positions_as_tokens() -> None:
    config = transformers.GPT2Config(
        n_layer=1, n_embd=8, n_head=2, vocab_size=models_zoo.VOCABULARY, n_positions=12,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = shake(transformers.GPT2LMHeadModel(config).double().eval())
    assert_same_as_plain(model, cohort([[12, 3], [12], [9, 9, 9]]), settings=MIXED)


def test_nothing_is_stored_for_places_of_padding() -> None:
    (users,) = pack_ragged(groups_of([[64] * 9, [64] * 3]), Sizes(max_tokens=128 * 64))
    ranges = users.ranges
    assert ranges is not None
    used = int((users.weights > 0).sum())
    assert used == 12 < ranges.starts[-1] == len(users.weights)
    assert ranges.user_starts.tolist() == [min(start, used) for start in ranges.starts.tolist()]


def test_small_batches_have_places_for_small_users_and_few_empty_rows() -> None:
    # One large user decides the kind; the others have a third of its kind's fewest tokens.
    groups = groups_of([[32] * 20, *[[32] * 6] * 30])
    sizes = Sizes(max_tokens=40_960)
    (users,) = pack_ragged(groups, sizes)
    assert users.ranges is not None
    assert users.ranges.fewest_rows == 17
    # 200 rows are five thirty-seconds of a batch, with a place for every 17 // 3 rows and one more.
    assert len(users.weights) == 200
    assert users.count == 200 // 5 + 1
    # No batch has more places than a full one, whose stored gradients there is memory for.
    most = sizes.shape(20, 32).users
    assert all(sizes.shape(20, 32, share).users <= most for share in sizes.shares)


def test_the_last_users_of_a_cohort_stay_with_the_kind_before() -> None:
    sizes = Sizes(max_tokens=4_096)
    sizes.see_length(128)
    # Rows of 128 tokens. Users of up to 4 rows would be a kind of their own.
    few = [15, 15, 3, 3, 2]
    many = few + [1] * 60
    for rows, kinds in ((few, {5}), (many, {5, 1})):
        groups = [
            {name: torch.ones(n, 128, dtype=torch.long) for name in ("input_ids", "labels")}
            for n in rows
        ]
        batches = list(pack_ragged(groups, sizes))
        assert {b.ranges.fewest_rows for b in batches if b.ranges is not None} == kinds
        assert sum(int((b.weights > 0).sum()) for b in batches) == sum(rows)


def test_parts_of_a_batch_are_twice_as_fine_up_to_its_half() -> None:
    few, many = (Sizes(max_tokens=tokens).shares for tokens in (16_384, 40_960))
    assert few == [*(i / 16 for i in range(1, 8)), *(i / 8 for i in range(4, 8))]
    assert many == [*(i / 32 for i in range(1, 16)), *(i / 16 for i in range(8, 16))]
