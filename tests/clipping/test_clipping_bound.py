"""No user's contribution exceeds the clip norm, measured in float64 on what is really summed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from comparing import cohort, fast_sum, pairs_wherever_possible, shake, trainable
from torch import Tensor, nn

import models_zoo
from userdp.clipping.batches.equal import pack_equal
from userdp.clipping.batches.users import Users
from userdp.clipping.execute.execution import Execution
from userdp.clipping.factors import clip_factors
from userdp.clipping.fast import FastSettings
from userdp.clipping.gradients import many_users
from userdp.clipping.gradients.forms import EmbeddingRows, Pair, Stored
from userdp.clipping.gradients.sums import Sums
from userdp.clipping.rules import AutomaticClip, ClipRule, FlatClip, NormalisedClip, PerLayerClip
from userdp.updates import causal_lm_loss

ROUNDING = 1e-5
# Users in a batch, and places for users: two stay empty.
REAL, PLACES = 14, 16
FORMS = {"stored": contextlib.nullcontext, "pairs": pairs_wherever_possible}


@contextlib.contextmanager
def everyone_but(user: int) -> Iterator[None]:
    """All factors but one user's set to zero, where the fast path has just computed them."""

    def alone(squared: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        factors = clip_factors(squared, *args, **kwargs)
        return torch.where(torch.arange(squared.shape[1]) == user, factors, 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(many_users, "clip_factors", alone)
        yield


def exact_norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([t.double().square().sum() for t in tensors]).sum().sqrt())


def contributions(
    model: nn.Module, num_users: int, rule: ClipRule, *, compute_dtype: torch.dtype | None = None
) -> tuple[list[float], list[float]]:
    """The norm of what each user adds to the sum, and of what each padded user adds."""
    parameters = trainable(model)
    execution = Execution(record_loss=causal_lm_loss, compute_dtype=compute_dtype)
    fast: many_users.ManyUsers | None = None
    users: list[float] = []
    padded: list[float] = []
    for number in range(-(-num_users // REAL)):
        batch = batch_of_users(number)
        fast = fast or many_users.ManyUsers(model, parameters, rule, batch, execution=execution)
        for user in range(batch.count):
            totals = [torch.zeros(p.shape) for p in parameters]
            with everyone_but(user):
                fast(batch, totals)
            (users if user < REAL else padded).append(exact_norm(totals))
    return users, padded


def batch_of_users(number: int) -> Users:
    """Users of one and of two ragged records, and places that stay empty."""
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(2, 9, (REAL, 2), generator=generator).tolist()
    groups = cohort([records[: 1 + user % 2] for user, records in enumerate(lengths)], seed=number)
    (batch,) = pack_equal(groups, max_tokens=PLACES * 2 * 16, ladder=True)
    assert (batch.count, batch.rows) == (PLACES, 2)
    return batch


def assert_bounded(model: nn.Module, rule: ClipRule, *, num_users: int, **options: Any) -> None:
    users, padded = contributions(model, num_users, rule, **options)
    assert len(users) >= num_users
    assert max(users) <= rule.bound * (1 + ROUNDING)
    # Somebody is clipped, and to the bound rather than far below it.
    assert max(users) >= rule.bound * (0.9 if isinstance(rule, PerLayerClip) else 0.99)
    # Nobody is left out for what rounding did to them.
    assert min(users) > 0
    assert padded
    assert max(padded) == 0.0


@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize("weights", ["bfloat16 weights", "float32 weights"])
@pytest.mark.parametrize(
    "users", [42, pytest.param(10_000, marks=pytest.mark.slow)], ids=["few", "ten thousand"]
)
def test_bfloat16_users_contribute_at_most_the_clip_norm(
    users: int, weights: str, forms: str
) -> None:
    half = weights == "bfloat16 weights"
    model = shake(models_zoo.build("gpt2 tied", torch.bfloat16 if half else torch.float32))
    with FORMS[forms]():
        assert_bounded(
            model,
            FlatClip(clip_norm=0.3),
            num_users=users,
            compute_dtype=None if half else torch.bfloat16,
        )


@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize("name", ["llama tied + lora", "llama", "own parameter", "lstm tied"])
def test_bfloat16_users_of_other_models_are_bounded_too(name: str, forms: str) -> None:
    with FORMS[forms]():
        model = shake(models_zoo.build(name, torch.bfloat16))
        assert_bounded(model, FlatClip(clip_norm=1e-3), num_users=28)


@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize(
    "rule",
    [PerLayerClip(clip_norm=0.01), NormalisedClip(clip_norm=0.1), AutomaticClip(stability=1e-4)],
    ids=str,
)
def test_every_clip_rule_keeps_its_bound_in_bfloat16(rule: ClipRule, forms: str) -> None:
    with FORMS[forms]():
        assert_bounded(shake(models_zoo.build("gpt2 tied", torch.bfloat16)), rule, num_users=28)


@pytest.mark.parametrize("forms", FORMS)
def test_bound_holds_inside_a_callers_autocast(forms: str) -> None:
    # Norms, factors and sums must not follow the caller's dtype for products.
    model = shake(models_zoo.build("gpt2 tied", torch.float32))
    with FORMS[forms](), torch.autocast("cpu", torch.bfloat16):
        assert_bounded(model, FlatClip(clip_norm=0.3), num_users=28)


@pytest.mark.parametrize("tokens", [16, 1000])
def test_callers_autocast_changes_nothing(tokens: int) -> None:
    model = shake(models_zoo.build("gpt2 tied", torch.float32))
    rule = FlatClip(clip_norm=0.1)
    settings = FastSettings(microbatch_tokens=tokens)
    groups = cohort([[9, 12, 7], [5], [5], [8, 3]])
    expected = [t.clone() for t in fast_sum(model, groups, rule, settings=settings)]
    with torch.autocast("cpu", torch.bfloat16):
        found = fast_sum(model, groups, rule, settings=settings)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


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


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("digits", ["any", "one way", "equal tokens", "cancelling"])
@pytest.mark.parametrize("layout", LAYOUTS)
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
