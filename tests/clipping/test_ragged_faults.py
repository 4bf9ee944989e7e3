"""Mixed batches where users, rows and layers are least alike: nobody's rows are lost or lent."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from comparing import (
    RAGGED,
    assert_same_as_plain,
    cohort,
    pairs_wherever_possible,
    shake,
    trainable,
)
from hypothesis import strategies as st
from test_clipping_bound import ROUNDING, everyone_but, exact_norm
from test_ragged import FORMS, MIXED, groups_of
from torch import Tensor, nn

import models_zoo
from userdp.clipping.batches.ragged import Sizes, pack_ragged
from userdp.clipping.execute.execution import Execution
from userdp.clipping.gradients import many_users
from userdp.clipping.rules import FlatClip
from userdp.clipping.settings import StepSettings
from userdp.losses import causal_lm_loss

# Rows of one length within a user, so that many short rows meet few long ones.
UNLIKE = st.lists(
    st.builds(
        lambda rows, length: [length] * rows,
        st.sampled_from([1, 2, 3, 5, 8, 17, 60]),
        st.sampled_from([1, 2, 7, 16, 30, 64, 128]),
    ),
    max_size=20,
)


@hypothesis.given(cohorts=st.lists(UNLIKE, min_size=1, max_size=3), tokens=st.integers(1, 2048))
@hypothesis.example(cohorts=[[[128], [16] * 6]], tokens=2048)
def test_no_user_has_more_rows_than_its_batch_says(
    cohorts: list[list[list[int]]], tokens: int
) -> None:
    # Kernels size their tables by it: rows beyond would be left out of a norm.
    sizes = Sizes(max_tokens=tokens)
    for lengths in cohorts:
        groups = groups_of(lengths)
        sizes.see(groups)
        for users in pack_ragged([group for group in groups if sizes.holds(group)], sizes):
            if users.ranges is not None:
                assert int(users.ranges.starts.diff().max()) <= users.ranges.most_rows


def test_many_short_rows_beside_a_long_one_give_the_plain_loops_sum() -> None:
    with pairs_wherever_possible():
        assert_same_as_plain(
            shake(models_zoo.build("llama tied")),
            cohort([[60], [3] * 15, [4] * 12, [50]]),
            rule=FlatClip(clip_norm=0.5),
            settings=StepSettings(mix_sizes=True, microbatch_tokens=1500, check=False),
        )


@hypothesis.given(rows=st.integers(1, 4), max_users=st.integers(1, 20))
@hypothesis.example(rows=1, max_users=2)
def test_no_batch_has_more_places_than_memory_allows(rows: int, max_users: int) -> None:
    # One more than users: the rows that nobody needs.
    sizes = Sizes(max_tokens=512, max_short_users=max_users)
    for users in pack_ragged(groups_of([[40] * rows] * 30), sizes):
        assert users.count <= max_users + 1
    sizes = Sizes(max_tokens=8192, max_users=max_users)
    for users in pack_ragged(groups_of([[600] * rows] * 30), sizes):
        assert users.count <= max_users + 1


def test_short_users_are_not_held_back_by_what_long_ones_store() -> None:
    sizes = Sizes(max_tokens=8192, max_users=2)
    (users,) = pack_ragged(groups_of([[128]] * 64), sizes)
    assert users.count == 64


class ReadTwice(nn.Module):
    """One layer at every token and again at the first alone: unlike many tokens in its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models_zoo.VOCABULARY, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, models_zoo.VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(self.embedding(input_ids)))
        return self.head(hidden + torch.tanh(self.mix(hidden[:, 0]))[:, None])


@pytest.mark.parametrize("forms", FORMS)
def test_layer_called_on_unlike_many_tokens_keeps_users_apart(forms: str) -> None:
    torch.manual_seed(0)
    with FORMS[forms]():
        assert_same_as_plain(ReadTwice().double(), cohort(RAGGED), settings=MIXED)


@pytest.mark.slow
@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize("name", ["gpt2 tied", "llama tied and trained + lora"])
def test_bfloat16_users_of_mixed_batches_contribute_at_most_the_clip_norm(
    name: str, forms: str
) -> None:
    model = shake(models_zoo.build(name, torch.float32))
    rule = FlatClip(clip_norm=0.3)
    (users,) = pack_ragged(
        cohort([[9, 12, 7], [5], [8, 3], [14], [6] * 5, [2, 2]]), Sizes(max_tokens=400)
    )
    execution = Execution(record_loss=causal_lm_loss, compute_dtype=torch.bfloat16)
    with FORMS[forms]():
        fast = many_users.ManyUsers(model, trainable(model), rule, users, execution=execution)
        for user, takes_part in enumerate(users.taking_part.tolist()):
            totals = [torch.zeros(p.shape) for p in trainable(model)]
            with everyone_but(user):
                fast(users, totals)
            norm = exact_norm(totals)
            assert (norm > 0) == takes_part
            assert norm <= rule.bound * (1 + ROUNDING)
