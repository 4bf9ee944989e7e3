"""Clipping: nobody moves the sum further than the clip norm."""

from __future__ import annotations

import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from userdp.clipping.plain import clip_update, clipped_sum
from userdp.clipping.rules import SMALLEST_NORM, AutomaticClip, FlatClip
from userdp.errors import InputError

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def exact_norm(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(math.fsum(x * x for t in tensors for x in t.double().flatten().tolist()))


@hypothesis.given(
    values=st.lists(
        st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), max_size=6),
        min_size=1,
        max_size=4,
    ),
    clip_norm=st.floats(1e-6, 1e6),
    dtype=st.sampled_from(DTYPES),
)
@hypothesis.settings(deadline=None, max_examples=400)
def test_clipped_update_norm_never_exceeds_clip_norm(
    values: list[list[float]], clip_norm: float, dtype: torch.dtype
) -> None:
    update = [torch.tensor(v, dtype=torch.float64).to(dtype) for v in values]
    clipped = clip_update(update, FlatClip(clip_norm=clip_norm))
    assert exact_norm(clipped) <= clip_norm
    assert all(tensor.dtype in (torch.float32, torch.float64) for tensor in clipped)
    if not all(torch.isfinite(tensor).all() for tensor in update):
        assert exact_norm(clipped) == 0.0


def test_largest_update_that_counts_is_clipped_to_the_smallest_norm_there_is() -> None:
    update = [torch.full((10_000,), 1e16)]
    found = exact_norm(clip_update(update, FlatClip(clip_norm=SMALLEST_NORM)))
    assert 0.999 * SMALLEST_NORM < found <= SMALLEST_NORM


@pytest.mark.parametrize("too_small", [0.0, -1.0, 1e-24, math.nan])
def test_clip_norms_whose_squares_float32_has_no_place_for_are_refused(too_small: float) -> None:
    with pytest.raises(InputError, match="must be at least 1e-15"):
        FlatClip(clip_norm=too_small)
    with pytest.raises(InputError, match="must be at least 1e-15"):
        AutomaticClip(stability=too_small)


@pytest.mark.parametrize("dtype", DTYPES)
def test_update_within_the_bound_is_returned_bit_for_bit(dtype: torch.dtype) -> None:
    update = [torch.linspace(-1, 1, 17).to(dtype)]
    (clipped,) = clip_update(update, FlatClip(clip_norm=100.0))
    assert torch.equal(clipped, update[0].to(clipped.dtype))


def test_infinite_clip_norm_clips_nothing_but_still_drops_non_finite_updates() -> None:
    rule = FlatClip(clip_norm=math.inf)
    update = [torch.tensor([1e15, -2.0]), torch.tensor([[0.0]])]
    assert all(torch.equal(a, b) for a, b in zip(clip_update(update, rule), update, strict=True))
    for not_counted in (math.inf, math.nan, 1e30):
        assert exact_norm(clip_update([torch.tensor([not_counted])], rule)) == 0.0


def test_clip_keeps_the_direction_across_tensors() -> None:
    update = [torch.tensor([3.0]), torch.tensor([[4.0]])]
    clipped = clip_update(update, FlatClip(clip_norm=1.0))
    torch.testing.assert_close(clipped, [torch.tensor([0.6]), torch.tensor([[0.8]])])


def test_sum_of_no_update_is_zero_in_float32_or_wider() -> None:
    like = [torch.ones(2, dtype=torch.bfloat16), torch.ones(3, dtype=torch.float64)]
    total = clipped_sum([], FlatClip(clip_norm=1.0), like=like)
    assert [t.dtype for t in total] == [torch.float32, torch.float64]
    assert exact_norm(total) == 0.0


def test_sum_leaves_the_updates_alone() -> None:
    update = [torch.tensor([3.0, 4.0])]
    clipped_sum([update, update], FlatClip(clip_norm=1.0), like=update)
    assert torch.equal(update[0], torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.nan, -math.inf])
def test_clip_norm_must_be_positive(clip_norm: float) -> None:
    with pytest.raises(InputError, match="clip_norm"):
        FlatClip(clip_norm=clip_norm)


def test_replacing_a_user_moves_the_sum_twice_as_far() -> None:
    rule = FlatClip(clip_norm=0.5)
    opposite = [torch.tensor([1e9]), torch.tensor([-1e9])]
    a, b = (clipped_sum([[value]], rule, like=[value])[0] for value in opposite)
    assert float((a - b).abs()) == pytest.approx(1.0, rel=1e-5)
