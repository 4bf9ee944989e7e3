"""The arithmetic of per-user gradients: Gram norms from above, embedding rows, inner products."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from userdp.clipping.kernels import reference

EPS = torch.finfo(torch.float32).eps


def users_values(kind: str, length: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and output gradients of three users; all kinds but the first nearly cancel."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(3, *shape, generator=generator)  # noqa: E731
    x, y = draw(length, width), draw(length, width + 3)
    if kind == "alike inputs":
        x = 0.01 * x + draw(1, width)
        y = y - y.mean(1, keepdim=True)
    if kind == "opposite pairs":
        signs = torch.where(torch.arange(length) % 2 == 0, 1.0, -1.0)[:, None]
        x = 1e-3 * x + draw(1, width)
        y = (1e-3 * y + draw(1, width + 3)) * signs
    return x, y


@hypothesis.given(
    kind=st.sampled_from(["any", "alike inputs", "opposite pairs"]),
    length=st.integers(1, 80),
    width=st.integers(1, 90),
    seed=st.integers(0, 10_000),
)
def test_gram_norm_is_never_below_the_exact_norm_and_hardly_above(
    kind: str, length: int, width: int, seed: int
) -> None:
    x, y = users_values(kind, length, width, seed)
    exact = torch.bmm(y.double().mT, x.double()).square().sum((1, 2))
    largest = x.double().square().sum((1, 2)) * y.double().square().sum((1, 2))
    above = reference.gram_norms(x, y).double() - exact
    allowed = (reference.TORCH_GRAM_ROUNDINGS + 2) * EPS * (largest + exact) + 1e-28
    allowed += (2 * width + 3) / 8 * EPS * exact
    # The rounding of the squared norm itself is covered by the margin of the clip factors.
    assert bool((above >= -2 * EPS * exact).all())
    assert bool((above <= allowed).all())


@hypothesis.given(
    ids=st.lists(st.lists(st.integers(0, 5), min_size=7, max_size=7), min_size=1, max_size=4),
    seed=st.integers(0, 10_000),
)
def test_embedding_norm_is_that_of_the_whole_matrix(ids: list[list[int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids_UL = torch.tensor(ids)
    gradients = torch.randn(*ids_UL.shape, 3, generator=generator, dtype=torch.float64)
    whole = torch.zeros(len(ids), 6, 3, dtype=torch.float64)
    for user in range(len(ids)):
        whole[user].index_add_(0, ids_UL[user], gradients[user])
    expected = whole.square().sum((1, 2))
    # All pairs of tokens, and sorted tokens.
    for most_paired in (7, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "MOST_TOKENS_COMPARED", most_paired)
            found = reference.embedding_squared_norms(ids_UL, gradients)
        torch.testing.assert_close(found, expected)


@hypothesis.given(users=st.integers(1, 4), length=st.integers(1, 9), seed=st.integers(0, 10_000))
def test_inner_product_of_embedding_and_head_is_that_of_whole_matrices(
    users: int, length: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    vocabulary, width = 6, 3
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    ids = torch.randint(0, vocabulary, (users, length), generator=generator)
    at_rows, x, y = (
        draw(users, length, width),
        draw(users, length, width),
        draw(users, length, vocabulary),
    )
    embedding = torch.zeros(users, vocabulary, width, dtype=torch.float64)
    for user in range(users):
        embedding[user].index_add_(0, ids[user], at_rows[user])
    head = torch.bmm(y.mT, x)
    expected = (embedding * head).sum((1, 2))
    owners = torch.arange(users)
    for found in (
        reference.inner_with_stored(ids, at_rows, head, owners),
        reference.inner_with_pair(ids, at_rows, x, y),
    ):
        inner, error = found
        torch.testing.assert_close(inner, expected)
        assert bool((error >= 0).all() and (error <= 1e-12 * (1 + expected.abs()) * 100).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_factor_of_zero_silences_what_is_not_finite(dtype: torch.dtype, bad: float) -> None:
    values = torch.ones(3, 4, 5).to(dtype)
    values[1, 2, 3] = bad
    factors = torch.tensor([0.5, 0.0, 1.0])
    scaled = reference.scaled(values, factors)
    assert scaled.dtype == dtype
    assert not scaled[1].any()
    total = torch.zeros(4, 5)
    reference.add_weighted_sum(total, values, factors)
    assert torch.equal(total, torch.full((4, 5), 1.5))
    assert not values[1].any()


def test_sums_of_a_padded_head_leave_out_the_padding() -> None:
    total = torch.zeros(3, 2)
    values = torch.ones(4, 5, 2)
    reference.add_weighted_sum(total, values, torch.full((4,), 0.5))
    assert torch.equal(total, torch.full((3, 2), 2.0))
    reference.add_product(total, torch.ones(5, 7), torch.ones(7, 2))
    assert torch.equal(total, torch.full((3, 2), 9.0))


def test_product_of_a_head_without_padding_leaves_spare_rows_alone() -> None:
    total = torch.full((5, 2), torch.nan)
    total[:3] = 1.0
    reference.add_product(total, torch.ones(3, 7), torch.ones(7, 2))
    assert torch.equal(total[:3], torch.full((3, 2), 8.0))
    assert total[3:].isnan().all()


@pytest.mark.parametrize("sizes", [(2e-23, 1e18), (1e-22, 3e18), (1e-20, 1e17), (1e18, 1e-23)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gram_norm_of_values_whose_squares_are_too_small_is_still_from_above(
    dtype: torch.dtype, sizes: tuple[float, float]
) -> None:
    x, y = (torch.full((1, 4, 8), size).to(dtype) for size in sizes)
    exact = torch.bmm(y.double().mT, x.double()).square().sum((1, 2))
    assert bool((reference.gram_norms(x, y).double() >= exact).all())


@pytest.mark.parametrize("factor", [1e4, float("inf"), float("nan")])
def test_exposure_of_a_user_does_not_depend_on_others(factor: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(6, 5, width, generator=generator) for width in (4, 3))
    starts = torch.tensor([0, 2, 3, 3, 6])
    before = reference.exposure(x, [y], starts)
    x[:2] *= factor
    after = reference.exposure(x, [y], starts)
    assert torch.equal(before[1:], after[1:])
    alone = reference.exposure(x[3:].reshape(1, 15, 4), [y[3:].reshape(1, 15, 3)])
    torch.testing.assert_close(after[3:], alone)


def test_rows_of_a_user_are_added_up_before_they_are_squared() -> None:
    # Users of three rows, of two opposite ones, and of one.
    values = torch.tensor(
        [[1.0, 2.0], [3.0, -1.0], [2.0, 2.0], [5.0, 1.0], [-5.0, -1.0], [0.5, 0.0]]
    )
    starts, owner = torch.tensor([0, 3, 5, 6]), torch.tensor([0, 0, 0, 1, 1, 2])
    found = reference.ragged_squared_norms(values, owner, starts)
    exact = torch.tensor([45.0, 0.0, 0.25])
    assert bool((found >= exact).all())
    torch.testing.assert_close(found, exact, rtol=0.0, atol=1e-3)
