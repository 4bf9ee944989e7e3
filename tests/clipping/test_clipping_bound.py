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
from userdp.clipping.gradients import many_users
from userdp.clipping.rules import AutomaticClip, ClipRule, FlatClip, NormalisedClip, PerLayerClip
from userdp.clipping.settings import StepSettings
from userdp.losses import causal_lm_loss

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


@pytest.mark.slow
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
    settings = StepSettings(microbatch_tokens=tokens)
    groups = cohort([[9, 12, 7], [5], [5], [8, 3]])
    expected = [t.clone() for t in fast_sum(model, groups, rule, settings=settings)]
    with torch.autocast("cpu", torch.bfloat16):
        found = fast_sum(model, groups, rule, settings=settings)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
