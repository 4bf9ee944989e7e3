"""Clip rules in plans and configurations: written, read back, refused where they make no sense."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from userdp.clipping.rules import (
    AdaptiveClip,
    AutomaticClip,
    ClipRule,
    FlatClip,
    NormalisedClip,
    PerLayerClip,
    PerVectorClip,
)
from userdp.config.file import Config, load_config
from userdp.errors import InputError
from userdp.plan import Plan

RULES: list[ClipRule] = [
    FlatClip(clip_norm=0.1),
    PerLayerClip(clip_norm=0.3),
    PerVectorClip(clip_norm=0.3),
    PerVectorClip(norms=(0.1, 0.2, 0.7), groups=("a.*", "b", "*")),
    NormalisedClip(clip_norm=1 / 3),
    AutomaticClip(),
    AutomaticClip(stability=1e-7),
    AdaptiveClip(clip_norm=0.1, count_noise=3.0, target_quantile=0.7, learning_rate=0.05),
]


def plan_of(rule: ClipRule, **changes: object) -> Plan:
    settings: dict[str, object] = {
        "num_users": 100,
        "expected_cohort_size": 10,
        "group_size": 4,
        "steps": 7,
        "noise_multiplier": 2.0,
        "delta": 1e-3,
    }
    return Plan.sample_users(clip=rule, **(settings | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_plan_with_any_clip_rule_survives_json(rule: ClipRule) -> None:
    plan = plan_of(rule)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_plan_without_a_clip_norm_survives_json() -> None:
    rule = FlatClip(clip_norm=math.inf)
    plan = plan_of(rule, noise_multiplier=0.0, non_private=True)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_noise_is_scaled_to_what_one_update_can_add(rule: ClipRule) -> None:
    bound = 1.0 if isinstance(rule, NormalisedClip | AutomaticClip) else rule.clip_norm
    assert rule.bound == bound
    if isinstance(rule, AdaptiveClip):
        assert plan_of(rule).noise_stddev > 2.0 * bound
    else:
        assert plan_of(rule).noise_stddev == 2.0 * bound


@pytest.mark.parametrize("rule", [NormalisedClip, PerLayerClip], ids=lambda kind: kind.__name__)
def test_clip_norm_of_other_rules_must_be_positive(rule: type[FlatClip]) -> None:
    with pytest.raises(InputError, match="clip_norm"):
        rule(clip_norm=0.0)


def test_normalised_clipping_needs_a_finite_norm() -> None:
    with pytest.raises(InputError, match="finite"):
        NormalisedClip(clip_norm=math.inf)


def test_stability_must_be_positive() -> None:
    with pytest.raises(InputError, match="stability"):
        AutomaticClip(stability=0.0)


# ---- the configuration


def config(tmp_path: Path, *lines: str) -> Config:
    path = tmp_path / "run.toml"
    privacy = "\n".join(lines)
    path.write_text(
        f"""
[data]
store = "store"
[model]
path = "model"
[privacy]
num_users = 100
expected_cohort_size = 10
group_size = 4
noise_multiplier = 2.0
delta = 1e-3
{privacy}
[training]
steps = 7
"""
    )
    return load_config(path)


GOOD: dict[ClipRule, list[str]] = {
    FlatClip(clip_norm=0.5): ["clip_norm = 0.5"],
    PerLayerClip(clip_norm=0.5): ['clipping = "per-layer"', "clip_norm = 0.5"],
    PerVectorClip(clip_norm=0.5): ['clipping = "per-vector"', "clip_norm = 0.5"],
    PerVectorClip(groups=("embedding.*", "*"), norms=(3.0, 4)): [
        'clipping = "per-vector"',
        'clip_groups = ["embedding.*", "*"]',
        "clip_norms = [3.0, 4]",
    ],
    NormalisedClip(clip_norm=0.5): ['clipping = "normalised"', "clip_norm = 0.5"],
    AutomaticClip(): ['clipping = "automatic"'],
    AdaptiveClip(clip_norm=0.5, count_noise=3.0): [
        'clipping = "adaptive"',
        "clip_norm = 0.5",
        "clip_count_noise = 3",
    ],
    AdaptiveClip(clip_norm=0.5, count_noise=3.0, target_quantile=0.8): [
        'clipping = "adaptive"',
        "clip_norm = 0.5",
        "clip_count_noise = 3",
        "clip_quantile = 0.8",
    ],
}


@pytest.mark.parametrize("rule", GOOD, ids=str)
def test_configuration_gives_its_clip_rule(rule: ClipRule, tmp_path: Path) -> None:
    assert config(tmp_path, *GOOD[rule]).plan().clip == rule


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        (['clipping = "per-layer"'], "clip_norm is missing"),
        (['clipping = "per-vector"'], "clip_norm"),
        (["clip_norm = 1", "clip_norms = [1.0]"], "clip_norms has no meaning"),
        (['clipping = "per-vector"', "clip_norm = 1", "clip_norms = [3, 4]"], "leave clip_norm"),
        (['clipping = "per-vector"', 'clip_groups = ["*"]', "clip_norms = [3, 4]"], "one norm"),
        (['clipping = "per-vector"', "clip_norms = [3, inf]"], "finite"),
        (['clipping = "per-vector"', "clip_norms = [3, 0]"], "must be at least"),
        (['clipping = "adaptive"', "clip_norm = 1"], "clip_count_noise is missing"),
        (['clipping = "adaptive"', "clip_count_noise = 3"], "clip_norm is missing"),
        (['clipping = "automatic"', "clip_norm = 1"], "clip_norm has no meaning"),
        (["clip_norm = 1", "clip_count_noise = 3"], "clip_count_noise has no meaning"),
        (["clip_norm = 1", "clip_quantile = 0.5"], "clip_quantile has no meaning"),
        (
            ['clipping = "automatic"', "clip_quantile = 0.5"],
            "clip_quantile has no meaning",
        ),
        (
            ['clipping = "adaptive"', "clip_norm = 1", "clip_count_noise = 3", "clip_quantile = 1"],
            "target_quantile",
        ),
        (['clipping = "adaptive"', "clip_norm = 1", "clip_count_noise = 0"], "count_noise"),
        (['clipping = "adaptive"', "clip_norm = inf", "clip_count_noise = 3"], "adapt"),
        (['clipping = "normalised"', "clip_norm = inf"], "finite"),
        (['clipping = "adaptiv"', "clip_norm = 1"], "clipping"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together_are_refused_by_name(
    lines: list[str], named: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=rf"run\.toml: .*{named}"):
        config(tmp_path, *lines)


def test_count_noise_too_small_for_the_noise_multiplier_is_refused(tmp_path: Path) -> None:
    lines = ['clipping = "adaptive"', "clip_norm = 1", "clip_count_noise = 1"]
    with pytest.raises(InputError, match="count_noise"):
        config(tmp_path, *lines).plan()
