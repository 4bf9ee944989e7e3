"""The conformance suite of clip rules, run on every registered one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from common_rules import (
    check_every_number_is_said,
    check_frozen,
    check_json,
    check_keys,
    check_named,
    check_words,
)
from part_examples import each, without_example

from userdp.clipping.factors import LARGEST_NORM, clip_factors
from userdp.clipping.rules import CLIP_RULES, ClipRule

# Zero, tiny, around every clip norm that is tried, huge.
NORMS = np.concatenate([[0.0], np.logspace(-18, 18, 1001), [0.1, 0.5, 1.0, 2.0, 30.0]])
SHARES = [1.0, 1 - 1e-6, 0.5, 1 / math.sqrt(7), 1e-3]
KINDS: dict[str, Any] = {
    "numpy": lambda norms: norms,
    "torch": torch.from_numpy,
    "torch float32": lambda norms: torch.from_numpy(norms).float(),
}


def tried(rule: ClipRule) -> list[float]:
    """Clip norms other than the rule's own, as an adaptive one comes to; those that go on."""
    return [rule.clip_norm, *([] if math.isinf(rule.clip_norm) else [1e-6, 0.3, 7.0, 1e6])]


def test_every_registered_clip_rule_has_an_example() -> None:
    assert without_example(CLIP_RULES) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", SHARES)
@each(CLIP_RULES)
def test_no_scaled_update_exceeds_its_share_of_the_bound(
    part: ClipRule, share: float, kind: str
) -> None:
    norms = KINDS[kind](NORMS)
    rounding = 1e-6 if kind == "torch float32" else 1e-12
    for clip_norm in tried(part):
        with np.errstate(divide="ignore"):
            factors = part.factor(norms, clip_norm, share)
        scaled = np.asarray(factors * norms, dtype=np.float64)
        assert np.asarray(factors).shape == NORMS.shape
        assert np.isfinite(np.asarray(factors)).all()
        assert (np.asarray(factors) >= 0).all()
        assert scaled.max() <= share * part.bound_at(clip_norm) * (1 + rounding)


@each(CLIP_RULES)
def test_large_updates_come_close_to_the_bound(part: ClipRule) -> None:
    # A rule that scales everything to nothing would keep every bound.
    if not part.bounds_updates:
        return
    for share in SHARES:
        norms = np.array([1e12])
        scaled = part.factor(norms, part.clip_norm, share) * norms
        assert scaled[0] == pytest.approx(share * part.bound, rel=1e-6)


@each(CLIP_RULES)
def test_larger_updates_do_not_end_up_smaller(part: ClipRule) -> None:
    with np.errstate(divide="ignore"):
        norms = np.sort(NORMS)
        scaled = part.factor(norms, part.clip_norm, 1.0) * norms
    assert (np.diff(scaled) >= -1e-12 * scaled[1:]).all()


@pytest.mark.parametrize("layers", [1, 5])
@each(CLIP_RULES)
def test_all_layers_together_stay_within_the_bound(part: ClipRule, layers: int) -> None:
    generator = torch.Generator().manual_seed(0)
    norms = 10 ** (torch.rand(layers if part.by_layer else 1, 500, generator=generator) * 20 - 10)
    for margin in (0.0, 1e-6, 0.1):
        for clip_norm in (None, *map(torch.tensor, tried(part))):
            factors = clip_factors(norms.square(), part, margin=margin, clip_norm=clip_norm)
            scaled = (factors * norms).double().norm(dim=0)
            bound = part.bound if clip_norm is None else part.bound_at(clip_norm)
            assert float(scaled.max()) <= float((1 - margin) * bound) * (1 + 1e-6)


@pytest.mark.parametrize("norm", [math.nan, math.inf, 2 * LARGEST_NORM])
@each(CLIP_RULES)
def test_who_has_no_usable_norm_gets_zero(part: ClipRule, norm: float) -> None:
    squared = torch.tensor([[1.0, norm**2 if math.isfinite(norm) else norm]])
    factors = clip_factors(squared, part, margin=0.0)
    assert factors[0, 1] == 0
    assert factors[0, 0] > 0


@each(CLIP_RULES)
def test_the_rule_at_another_clip_norm_is_the_same_kind_of_rule(part: ClipRule) -> None:
    moved = part.at(3.0)
    assert type(moved) is type(part)
    # Either it has a clip norm to choose, or it is the same rule as before.
    assert moved.clip_norm == 3.0 or moved == part
    assert moved.bound == moved.bound_at(moved.clip_norm)
    assert moved.by_layer == part.by_layer
    assert moved.count_stddev == part.count_stddev
    assert moved.at(part.clip_norm) == part


@each(CLIP_RULES)
def test_the_next_steps_rule_is_the_same_but_for_a_count_that_is_paid_for(part: ClipRule) -> None:
    if part.count_stddev is None:
        assert part.following(None) == part
        return
    assert part.count_stddev > 0
    for share in (-100.0, 0.0, 0.5, 1.0, 100.0):
        after = part.following(share)
        assert type(after) is type(part)
        assert after.count_stddev == part.count_stddev
        assert math.isfinite(after.clip_norm)
        assert after.clip_norm > 0


@each(CLIP_RULES)
def test_parameters_are_frozen_named_and_written_down(part: ClipRule) -> None:
    check_frozen(part)
    check_json(CLIP_RULES, part)
    check_named(CLIP_RULES, part)
    check_keys(part)
    check_words(part)
    # What is done with a count that was paid for costs nothing, and a rule is the same wherever a
    # run stands.
    check_every_number_is_said(part, but=["learning_rate", "taken"])
    assert part.words
