"""Sums of clipped forms: no rounding carries a user over the bound."""

from __future__ import annotations

import pytest
import torch
from test_clipping_bound import ROUNDING, exact_norm
from torch import Tensor

from userdp.clipping.batches.users import RowRanges
from userdp.clipping.factors import clip_factors
from userdp.clipping.gradients.forms import EmbeddingRows, Form, Pair, Stored
from userdp.clipping.gradients.sums import Sums
from userdp.clipping.rules import FlatClip, PerLayerClip


@pytest.mark.parametrize("size", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("form", ["stored", "pair"])
def test_tied_uses_that_nearly_cancel_do_not_hide_the_rest(form: str, size: float) -> None:
    # ||e + h||^2 from ||e||^2 + ||h||^2 + 2 <e, h>: what is left of large terms is mostly rounding.
    generator = torch.Generator().manual_seed(0)
    users, length, width, vocabulary = 200, 5, 8, 11
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    ids = torch.stack([torch.randperm(vocabulary, generator=generator) for _ in range(users)])
    ids = ids[:, :length]
    x = size * draw(users, length, width)
    # Every token's output gradient meets its own row alone: h is the rows of x, nearly.
    y = torch.zeros(users, length, vocabulary).scatter_(2, ids[..., None], 1.0)
    rows = EmbeddingRows(ids_UL=ids, gradients_ULD=0.1 * draw(users, length, width) - x)
    head = (
        Stored(gradients_U=torch.bmm(y.mT, x))
        if form == "stored"
        else Pair(inputs_ULI=x, output_gradients_ULO=y)
    )
    rule = FlatClip(clip_norm=0.01)
    for user in range(users):
        sums, total = Sums(1), torch.zeros(vocabulary, width)
        squared = sums.squared_norms([(0, rows), (0, head)], [(0, 1)])
        factors = clip_factors(squared, rule, margin=2.0**-20)
        alone = torch.where(torch.arange(users) == user, factors, 0.0)
        sums.add([total, total], sums.scale(alone, rule.bound))
        assert exact_norm([total]) <= rule.bound * (1 + ROUNDING)


def pairs_that_round(layout: str, digits: str, user: int) -> list[tuple[int, Pair]]:
    """One user's pairs, by group; `digits` says how the side that is scaled will round."""
    generator = torch.Generator().manual_seed(user)
    draw = lambda *shape: torch.randn(1, *shape, generator=generator)  # noqa: E731

    def sides(length: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
        x, y = draw(length, 24), draw(length, 32)
        if digits == "one way":
            # All leading digits are the same: by some factors they are all rounded up.
            x = x.sign() * (1 + 0.99 * torch.rand(1, generator=generator))
        if digits == "equal tokens":
            x, y = (side[:, :1].expand(-1, length, -1).contiguous() for side in (x, y))
        if digits == "cancelling":
            x = x[:, :1] + 1e-2 * x
            y = y - y.mean(1, keepdim=True)
        return x.to(dtype), y.to(dtype)

    def pair(x: Tensor, y: Tensor) -> Pair:
        return Pair(inputs_ULI=x, output_gradients_ULO=y)

    if layout == "one":
        return [(0, pair(*sides(12)))]
    if layout == "lengths":
        # The first that is looked at, the shortest, adds nothing and moves nothing.
        still, _ = sides(5)
        silent = pair(still, torch.zeros(1, 5, 32).bfloat16())
        return [(0, pair(*sides(12))), (0, silent), (0, pair(*sides(12)))]
    if layout == "float32 too":
        return [(0, pair(*sides(12, torch.float32))), (0, pair(*sides(12)))]
    if layout == "layers":
        return [(group, pair(*sides(12))) for group in range(3)]
    x, y = sides(12)
    return [(0, pair(x, y)), (0, pair(x, draw(12, 40).bfloat16()))]


LAYOUTS = ["one", "lengths", "float32 too", "layers", "shared input"]
DIGITS = ["any", "one way", "equal tokens", "cancelling"]
# Every layout and every kind of digits is tried by default, and not each with each.
BY_DEFAULT = {("one", digits) for digits in DIGITS} | {("layers", digits) for digits in DIGITS}
BY_DEFAULT |= {(layout, digits) for layout in LAYOUTS for digits in ("one way", "cancelling")}


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize(
    ("layout", "digits"),
    [
        pytest.param(
            layout, digits, marks=[] if (layout, digits) in BY_DEFAULT else pytest.mark.slow
        )
        for layout in LAYOUTS
        for digits in DIGITS
    ],
)
def test_rounding_of_scaled_pairs_cannot_carry_a_user_over_the_bound(
    layout: str, digits: str, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not room:
        monkeypatch.setattr(
            "userdp.clipping.gradients.sums.rounding_factors", lambda factors, *_: factors
        )
    users, at_bound, clip_norm = 150, 0, 0.01
    by_layer = layout == "layers"
    rule = PerLayerClip(clip_norm=clip_norm) if by_layer else FlatClip(clip_norm=clip_norm)
    for user in range(users):
        forms = pairs_that_round(layout, digits, user)
        sums = Sums(3 if by_layer else 1)
        totals = [
            torch.zeros(form.output_gradients_ULO.shape[2], form.inputs_ULI.shape[2])
            for _, form in forms
        ]
        squared = sums.squared_norms(forms, [])
        factors = clip_factors(squared, rule, margin=1e-6)
        sums.add(totals, sums.scale(factors, rule.bound))
        norm = exact_norm(totals)
        # Nobody is lost; who might have been moved too far is scaled by a power of two.
        assert 0.49 * clip_norm <= norm <= clip_norm * (1 + 1e-7)
        at_bound += norm >= 0.98 * clip_norm
    # What rounding may add is seen: with room for it most are at the bound, without few are. Where
    # sums all but cancel, the room is larger.
    if not room:
        assert at_bound <= 0.2 * users
    elif digits != "cancelling":
        assert at_bound >= 0.6 * users


@pytest.mark.parametrize("above", [1e-4, 1e-3, 3e-3])
def test_users_just_above_the_clip_norm_are_not_halved(above: float) -> None:
    # By a factor of 0.999 no bfloat16 value changes, and all would have moved the same way.
    at_bound = 0
    for user in range(20):
        form = pairs_that_round("one", "any", user)
        sums, total = Sums(1), torch.zeros(32, 24)
        squared = sums.squared_norms(form, [])
        rule = FlatClip(clip_norm=float(squared.sqrt()) / (1 + above))
        sums.add([total], sums.scale(clip_factors(squared, rule, margin=1e-6), rule.bound))
        norm = exact_norm([total])
        assert norm <= rule.bound
        at_bound += norm >= 0.98 * rule.bound
    assert at_bound >= 15


@pytest.mark.parametrize("size", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("form", ["stored by row", "tokens", "tokens of rows"])
def test_rows_that_nearly_cancel_do_not_hide_the_rest(form: str, size: float) -> None:
    # Rows are scaled one by one: what is left of large ones is mostly rounding. Seed 0.
    generator = torch.Generator().manual_seed(0)
    users, shape = 40, (8, 11)
    large = size * torch.randn(users, *shape, generator=generator)
    rest = 0.1 * torch.randn(users, *shape, generator=generator)
    rows = torch.stack([large, rest - large], 1).flatten(0, 1)
    ids = torch.arange(shape[0]).expand(2 * users, -1)
    ranges: RowRanges | None = RowRanges(
        starts=(starts := torch.arange(0, 2 * users + 1, 2, dtype=torch.int32)),
        user_starts=starts,
        user_of_row=torch.arange(users).repeat_interleave(2),
        fewest_rows=1,
        most_rows=2,
        full_rows=2 * users,
    )
    made: Form = EmbeddingRows(ids_UL=ids, gradients_ULD=rows)
    if form == "stored by row":
        made = Stored(gradients_U=rows, by_row=True)
    if form == "tokens":
        ranges = None
        made = EmbeddingRows(
            ids_UL=ids.reshape(users, -1), gradients_ULD=rows.view(users, -1, shape[1])
        )
    rule = FlatClip(clip_norm=0.01)
    for user in range(users):
        sums, total = Sums(1), torch.zeros(shape)
        squared = sums.squared_norms([(0, made)], [], ranges)
        factors = clip_factors(squared, rule, margin=2.0**-20)
        # Stored values are silenced in place: this user's stay.
        alone = torch.where(torch.arange(users) == user, factors, factors * 1e-30)
        sums.add([total], sums.scale(alone, rule.bound))
        assert exact_norm([total]) <= rule.bound * (1 + ROUNDING)
