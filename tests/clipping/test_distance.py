"""Distances of updates tensor by tensor, and checks that hold one large update at a time."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from comparing import compare_on, trainable
from torch import Tensor

import models_zoo
from userdp import verify
from userdp.clipping.checks import verify as checks
from userdp.clipping.checks.distance import distance, distances, norm_of
from userdp.clipping.checks.wide_reference import wide_gradient
from userdp.clipping.execute import capture
from userdp.clipping.execute.capture import put_back
from userdp.clipping.plain import PlainClipping
from userdp.losses import causal_lm_loss
from userdp.probe import neighbours


def random_update(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((3, 4), (5,), ())]


def test_norms_are_those_of_all_tensors_in_one_vector() -> None:
    found, before, own = (random_update(seed) for seed in range(3))
    flat = [torch.cat([t.double().flatten() for t in update]) for update in (found, before, own)]
    assert norm_of(found) == pytest.approx(float(flat[0].norm()))
    expected = float((flat[0] - flat[1]).norm()), float((flat[0] - flat[1] - flat[2]).norm())
    assert distances(found, before, own) == pytest.approx(expected)
    assert distance(found, before) == pytest.approx(expected[0])


def test_what_is_no_number_stays_so() -> None:
    assert math.isnan(norm_of([torch.tensor(math.inf), torch.tensor(math.nan)]))
    assert norm_of([torch.tensor(math.inf), torch.tensor(1.0)]) == math.inf


def test_large_updates_are_probed_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models_zoo.build("gpt2 tied")
    kept = verify(model, sequence_length=8)
    monkeypatch.setattr(neighbours, "_LARGE", 0)
    large = verify(model, sequence_length=8)
    assert large.safe
    assert [p.name for p in large.probes] == [p.name for p in kept.probes]
    # Fewer users share a batch, so sums are rounded differently, in float64.
    for one, other in zip(large.probes, kept.probes, strict=True):
        assert one.movement == pytest.approx(other.movement, abs=1e-12)
        assert one.coupling == pytest.approx(other.coupling, abs=1e-12)
        assert one.allowed_coupling == other.allowed_coupling


def test_at_most_two_large_updates_are_held_when_paths_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = models_zoo.build("gpt2 tied")
    batch = models_zoo.ragged_batch([6] * 8, seed=3)
    expected = compare_on(model, batch)
    monkeypatch.setattr(checks, "_LARGE", 0)
    alive: list[Any] = []
    most = 0
    update = PlainClipping.update

    def counted(self: PlainClipping, *args: Any) -> list[Tensor]:
        nonlocal most
        found = update(self, *args)
        alive.append(weakref.ref(found[0]))
        most = max(most, sum(ref() is not None for ref in alive))
        return found

    monkeypatch.setattr(PlainClipping, "update", counted)
    assert compare_on(model, batch).errors == expected.errors
    assert len(alive) > 8
    assert most == 1
    assert len(trainable(model)) == len(expected.errors)


def test_the_oracle_of_a_large_model_runs_a_few_records_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = models_zoo.build("gpt2 tied")
    batch = models_zoo.ragged_batch([6] * 8, seed=3)
    monkeypatch.setattr(checks, "_LARGE_MODEL", 0)
    monkeypatch.setattr(checks, "_TOKENS_OF_LARGE", 13)
    seen: list[int] = []

    def noted(model: Any, part: Any, **options: Any) -> Tensor:
        seen.append(len(part["input_ids"]))
        return causal_lm_loss(model, part, **options)

    found = compare_on(model, batch, group_size=4, record_loss=noted)
    assert found.worst[1] < 1e-10
    # The oracle's two users, by twos; the fast path has all rows, and looks with two and three.
    assert seen.count(2) >= 4


def test_wide_gradients_of_parts_add_up() -> None:
    model = models_zoo.build("llama tied", torch.bfloat16)
    batch = models_zoo.ragged_batch([6, 3, 5], seed=3)
    whole, parts = (
        wide_gradient(
            model, trainable(model), batch, record_loss=causal_lm_loss, microbatch_records=size
        )
        for size in (None, 2)
    )
    assert distance(parts, whole) <= 1e-6 * norm_of(whole)


def test_large_values_are_put_back_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_LARGE", 0)
    tensor = torch.arange(4.0)
    with put_back(tensor):
        tensor.zero_()
    assert torch.equal(tensor, torch.arange(4.0))
