"""Rows 3, 4, 12 and 13 of the fault table, for every sampler that has a price."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from userdp.clipping.rules import FlatClip
from userdp.index import UserIndex
from userdp.plan import Plan
from userdp.prices.table import FIXED_GRAPH, event_of
from userdp.sampling import SAMPLERS, PublicNumbers, Sampler
from userdp.step import PrivateStep
from userdp.streams import RunSecret, Streams
from userdp.units import Adjacency, SamplingUnit

STEPS = 12
# What each sampler's own keys are; the rest follows from the public numbers.
OWN: dict[str, dict[str, int]] = {
    "CappedPoissonUsers": {"cap": 3},
    "CyclicPoissonUsers": {"parts": 3},
    "CyclicPoissonRecords": {"parts": 3},
    "MinSeparated": {"separation": 4},
}
PRICED = [kind for kind in SAMPLERS if kind.name != "shuffled" and "toy" not in kind.name]
each_sampler = pytest.mark.parametrize("kind", PRICED, ids=lambda kind: kind.__name__)


def plan_of(kind: type[Sampler], **changes: Any) -> Plan:
    """20 users with one row each, and two of them in a step on average."""
    public = PublicNumbers(
        num_users=20, num_records=20, expected_groups=2, group_size=3, steps=STEPS
    )
    settings: dict[str, Any] = {
        "clip": FlatClip(clip_norm=1.0),
        "noise_multiplier": 1.0,
        "delta": 1e-3,
        "adjacency": FIXED_GRAPH[0] if kind.is_ordered else Adjacency.ADD_REMOVE,
    }
    return Plan.of(kind, public, own=OWN.get(kind.__name__, {}), **(settings | changes))


def index_for(kind: type[Sampler], users: int) -> UserIndex:
    """The first `users` users. A fixed order has one of the users in turn in every step."""
    index = UserIndex.from_owners(range(users))
    if not kind.is_ordered:
        return index
    turns = np.arange(STEPS) % 20
    batches = np.where(turns < users, turns, -1)[:, None]
    return UserIndex(indptr=index.indptr, rows=index.rows, batches=batches)


def make(kind: type[Sampler], users: int, *, seed: int = 1, **options: Any) -> PrivateStep:
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    return PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        plan_of(kind),
        index_for(kind, users),
        record_loss=lambda model, batch: model(batch["x"])[:, 0],
        secret=RunSecret.fixed_for_tests(seed),
        **options,
    )


def run(step: PrivateStep) -> tuple[list[int], list[torch.Tensor]]:
    """How many groups each step had, and how it moved the weights."""
    sizes, moves = [], []
    for cohort in step.cohorts():
        before = step.model.weight.detach().clone()
        sizes.append(len(cohort))
        step.apply({"x": torch.zeros(len(rows), 3)} for rows in cohort)
        moves.append(step.model.weight.detach() - before)
    return sizes, moves


@each_sampler
def test_row_4_empty_cohorts_of_every_sampler_are_noised_and_charged(kind: type[Sampler]) -> None:
    # Two of 20 users are there, so most steps have nobody. A step of noise alone is a step.
    step = make(kind, users=2)
    sizes, moves = run(step)
    assert 0 in sizes
    assert all(bool((move != 0).all()) for move in moves)
    assert step.ledger.steps == STEPS
    # Whoever is there, the noise and the price are the same.
    many = make(kind, users=20)
    _, others = run(many)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(moves, others, strict=True))
    assert step.statement().epsilon == many.statement().epsilon


@each_sampler
def test_row_3_whatever_number_a_sampler_draws_by_is_in_its_price(kind: type[Sampler]) -> None:
    plan = plan_of(kind)
    for field in dataclasses.fields(plan.sampler):
        # All rows of a user are one update where users are drawn, however many they are. A fixed
        # order costs the smaller of its participations and what its steps have room for.
        if (field.name == "group_size" and kind.unit is SamplingUnit.USER) or kind.is_ordered:
            continue
        value = getattr(plan.sampler, field.name)
        other = value + 1 if isinstance(value, int) else value / 2
        changed = dataclasses.replace(plan.sampler, **{field.name: other})
        event = event_of(changed, plan.noise, plan.adjacency, steps=STEPS)
        assert event != plan.event(), field.name


@each_sampler
def test_row_12_no_draw_of_a_run_shares_a_stream_with_another(
    kind: type[Sampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every stream that was opened, by what it was opened for: a deal may be opened again, alike,
    # and nothing else may.
    opened: dict[bytes, set[tuple[str, int, int]]] = {}
    count = 0
    honest = Streams.key

    def noted(self: Streams, step: int, piece: int = 0) -> bytes:
        nonlocal count
        count += 1
        found = honest(self, step, piece)
        opened.setdefault(found, set()).add((self.purpose, step, piece))
        return found

    monkeypatch.setattr(Streams, "key", noted)
    run(make(kind, users=20))
    assert count >= STEPS
    assert all(len(uses) == 1 for uses in opened.values())


@each_sampler
def test_row_13_another_run_of_the_same_plan_draws_other_cohorts_and_other_noise(
    kind: type[Sampler],
) -> None:
    def cohorts(step: PrivateStep) -> list[list[int]]:
        found = []
        for cohort in step.cohorts():
            found.append(cohort.rows.tolist())
            step.apply({"x": torch.zeros(len(rows), 3)} for rows in cohort)
        return found

    first, second = make(kind, users=20, seed=1), make(kind, users=20, seed=2)
    drawn = cohorts(first), cohorts(second)
    assert bool((first.model.weight != second.model.weight).all())
    # Nothing is drawn in a fixed order.
    assert (drawn[0] == drawn[1]) is kind.is_ordered
