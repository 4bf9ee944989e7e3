"""The neighbour probe over many model families: each is safe, or refused with its cause."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import families
from userdp.clipping.checks.made_up import MadeUp
from userdp.clipping.fast import FastClipping
from userdp.clipping.plain import PlainClipping
from userdp.clipping.rules import FlatClip
from userdp.clipping.settings import PathName, StepSettings
from userdp.errors import MixedExamplesError
from userdp.losses import causal_lm_loss
from userdp.models.proven import PROVEN, is_proven
from userdp.probe.verify import UnsafeModelError, Verified, run_probes, verify, vocabulary_of
from userdp.updates.mean_gradient import MEAN_GRADIENT

PATHS: list[PathName] = ["fast", "plain"]


def probed(model: nn.Module, path: PathName, *, thorough: bool = False) -> Verified:
    vocabulary = vocabulary_of(model)
    assert vocabulary is not None
    return run_probes(
        model,
        MadeUp.tokens(vocabulary),
        sequence_length=families.LENGTH,
        group_size=3,
        record_loss=causal_lm_loss,
        update=MEAN_GRADIENT,
        rule=FlatClip(clip_norm=1.0),
        settings=StepSettings(path=path),
        thorough=thorough,
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", families.SAFE)
def test_one_user_moves_the_sum_by_its_own_update_in(name: str, path: PathName) -> None:
    found = probed(families.build(families.SAFE[name]), path)
    assert found.safe
    assert 0.5 < found.largest_movement <= 1 + 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", families.SAFE)
def test_thorough_probes_find_nothing_in(name: str) -> None:
    found = verify(families.build(families.SAFE[name]), sequence_length=families.LENGTH)
    assert found.safe, found.cause
    assert found.largest_movement <= 1 + 1e-5
    assert len(found.probes) > 60


@pytest.mark.slow
@pytest.mark.parametrize("name", families.SAFE)
def test_a_random_neighbour_moves_the_fast_sum_by_at_most_the_clip_norm_in(name: str) -> None:
    # Measured without the probe: other lengths, other users, a tight clip norm.
    model = families.build(families.SAFE[name])
    parameters = list(model.parameters())
    chance = random.Random(3)
    made_up, rule = MadeUp.tokens(families.VOCABULARY), FlatClip(clip_norm=1e-3)
    fast = FastClipping(model, parameters, rule, record_loss=causal_lm_loss)
    lengths = [chance.randint(2, families.LENGTH) for _ in range(6)]
    groups = [made_up.group(1 + i % 2, n, seed=i) for i, n in enumerate(lengths)]
    without = fast.clipped_sum(groups[1:], rule).total.values.clone()
    for order in (groups, groups[1:] + groups[:1]):
        moved = fast.clipped_sum(order, rule).total.values - without
        assert float(moved.double().norm()) <= rule.bound * (1 + 1e-5)


@pytest.mark.parametrize("name", families.PLAIN_ONLY)
def test_refused_on_the_fast_path_and_safe_alone(name: str) -> None:
    model = families.build(families.PLAIN_ONLY[name])
    with pytest.raises(MixedExamplesError, match=r'path="plain"'):
        probed(model, "fast").raise_if_unsafe()
    found = probed(model, "plain")
    assert found.safe
    assert found.largest_movement <= 1 + 1e-5


def test_state_that_a_model_keeps_is_the_cause_that_is_told() -> None:
    model = families.build(families.PLAIN_ONLY["recurrent gemma"])
    assert "between forward passes" in probed(model, "fast").cause


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", [*families.REFUSED, *families.MIXTURES])
def test_refused_by_name_on_both_paths(name: str, path: PathName) -> None:
    make = (families.REFUSED | families.MIXTURES)[name]
    cause = {"t5": "fails on made-up rows", "rwkv": "written during the forward pass"}
    with pytest.raises(MixedExamplesError, match=cause.get(name, "is a mixture of experts")):
        probed(families.build(make), path)


def test_proven_architectures_are_those_that_are_probed_here() -> None:
    safe = {name: families.build(make) for name, make in families.SAFE.items()}
    types = {model.config.model_type for model in safe.values()}  # type: ignore[union-attr]
    # An encoder that can be told to be a decoder is not on the list.
    assert types - {"bert"} == PROVEN
    assert {name for name, model in safe.items() if not is_proven(model)} == {"bert decoder"}
    rest = families.PLAIN_ONLY | families.REFUSED | families.MIXTURES
    assert not any(is_proven(families.build(make)) for make in rest.values())


def test_at_least_25_families_of_every_kind_are_probed() -> None:
    everything = families.SAFE | families.PLAIN_ONLY | families.REFUSED | families.MIXTURES
    types = {families.build(m).config.model_type for m in everything.values()}  # type: ignore[union-attr]
    assert len(types) >= 40


def test_refusal_says_how_far_the_sum_is_off() -> None:
    model = families.build(families.PLAIN_ONLY["bert"])
    with pytest.raises(UnsafeModelError, match=r"sum is off by \d.*padded"):
        probed(model, "fast").raise_if_unsafe()


def test_plain_loop_gives_each_user_its_own_padding_only() -> None:
    # An encoder sees padding: the sum of two users must be the sum of each alone.
    model = families.build(families.PLAIN_ONLY["bert"])
    parameters, rule = list(model.parameters()), FlatClip(clip_norm=1e-3)
    made_up = MadeUp.tokens(families.VOCABULARY)
    groups = [made_up.group(1, 5, seed=0), made_up.group(1, 17, seed=1)]

    def total(chosen: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        plain = PlainClipping(model, parameters, record_loss=causal_lm_loss)
        return plain.clipped_sum(chosen, rule).total.values

    torch.testing.assert_close(total(groups), total(groups[:1]) + total(groups[1:]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_joined_records_are_probed_where_they_are_asked_for(name: str) -> None:
    model = families.build(families.SAFE[name])
    settings = StepSettings(join_records=True)
    found = verify(model, sequence_length=families.LENGTH, path="fast", settings=settings)
    assert found.safe, found.cause
    assert found.largest_movement <= 1 + 1e-5
