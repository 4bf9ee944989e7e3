"""Prices of correlated noise: against what is added and by whom, and what is refused."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dp_accounting import dp_event

from userdp import Plan
from userdp.accounting import events
from userdp.clipping.rules import AdaptiveClip, FlatClip
from userdp.errors import InputError, UnaccountedPlanError
from userdp.noise import Banded, Gaussian
from userdp.prices.marks import Hypothetical, RecordLevel
from userdp.prices.table import ONE_OWNER, event_of
from userdp.sampling import (
    BallsInBins,
    CyclicPoissonRecords,
    CyclicPoissonUsers,
    MinSeparated,
    PoissonRecords,
    PoissonUsers,
    Sampler,
)
from userdp.units import Adjacency
from userdp.updates.filter import Filter

FIXED_GRAPH = (Adjacency.FIXED_GRAPH_ZERO_OUT, Adjacency.FIXED_GRAPH_REPLACE)
ORDERED = MinSeparated(group_size=3, separation=4, steps=12)


def noise(strategy: str = "optimised", *, bands: int = 4, steps: int = 12) -> Banded:
    return Banded(noise_multiplier=2.0, bands=bands, steps=steps, strategy=strategy)  # type: ignore[arg-type]


def plan(sampler: Sampler, own: Banded, **changed: Any) -> Plan:
    chosen: dict[str, Any] = {
        "clip": FlatClip(clip_norm=1.0),
        "steps": own.steps,
        "divisor": 8.0,
        "num_users": 1000,
        "delta": 1e-6,
    }
    return Plan(sampler=sampler, noise=own, **chosen | changed)


@pytest.mark.parametrize("adjacency", FIXED_GRAPH)
def test_fixed_order_is_one_gaussian_by_the_number_of_participations(adjacency: Adjacency) -> None:
    found = event_of(ORDERED, noise(), adjacency, steps=12)
    assert found == dp_event.GaussianDpEvent(2.0 / math.sqrt(3))
    # Fewer fit into the run than the bound allows.
    short = replace(ORDERED, steps=8)
    found = event_of(short, noise(steps=8), adjacency, steps=8)
    assert found == dp_event.GaussianDpEvent(2.0 / math.sqrt(2))


@pytest.mark.parametrize("strategy", ["optimised", "toeplitz", "inverse-square-root", "buffered"])
def test_fixed_order_costs_no_less_than_any_pattern_of_participation(strategy: str) -> None:
    own = noise(strategy)
    event = event_of(ORDERED, own, FIXED_GRAPH[0], steps=12)
    assert isinstance(event, dp_event.GaussianDpEvent)
    strategy_matrix = np.linalg.inv(own.mixing(12))
    worst = 0.0
    for k in (1, 2, 3):
        for steps in itertools.combinations(range(12), k):
            if all(b - a >= 4 for a, b in itertools.pairwise(steps)):
                worst = max(worst, float(np.linalg.norm(strategy_matrix[:, steps].sum(axis=1))))
    assert 2.0 / event.noise_multiplier >= worst * (1 - 1e-12)
    assert 2.0 / event.noise_multiplier == pytest.approx(worst, rel=0.05)


@pytest.mark.parametrize("adjacency", ONE_OWNER)
def test_users_in_turn_cost_one_sampled_gaussian_a_turn(adjacency: Adjacency) -> None:
    sampler = CyclicPoissonUsers(user_sampling_prob=0.2, parts=5, group_size=2)
    found = event_of(sampler, noise(), adjacency, steps=12)
    turn = events.poisson_users_gaussian(user_sampling_prob=0.2, noise_multiplier=2.0)
    assert found == events.repeated(turn, 3)


@pytest.mark.parametrize("adjacency", ONE_OWNER)
def test_records_in_turn_cost_a_coin_for_each_record(adjacency: Adjacency) -> None:
    sampler = CyclicPoissonRecords(record_sampling_prob=0.2, parts=4, group_size=3)
    found = event_of(sampler, noise(), adjacency, steps=13)
    turn = events.poisson_records_gaussian(
        record_sampling_prob=0.2, group_size=3, noise_multiplier=2.0
    )
    assert found == events.repeated(turn, 4)


def test_one_band_is_priced_as_independent_noise() -> None:
    own = noise(bands=1)
    for sampler in (
        PoissonUsers(user_sampling_prob=0.1, group_size=2),
        PoissonRecords(record_sampling_prob=0.1, group_size=2),
        CyclicPoissonUsers(user_sampling_prob=0.1, parts=3, group_size=2),
        CyclicPoissonRecords(record_sampling_prob=0.1, parts=3, group_size=2),
    ):
        ours = event_of(sampler, own, Adjacency.ADD_REMOVE, steps=12)
        gaussian = Gaussian(noise_multiplier=2.0)
        assert ours == event_of(sampler, gaussian, Adjacency.ADD_REMOVE, steps=12)


REFUSED: list[tuple[Sampler, Banded, Adjacency, str]] = [
    (replace(ORDERED, separation=3), noise(), FIXED_GRAPH[0], "bands=3"),
    (
        CyclicPoissonUsers(user_sampling_prob=0.2, parts=3, group_size=2),
        noise(),
        Adjacency.ADD_REMOVE,
        "more parts",
    ),
    (
        CyclicPoissonRecords(record_sampling_prob=0.2, parts=3, group_size=2),
        noise(),
        Adjacency.ADD_REMOVE,
        "more parts",
    ),
    (
        CyclicPoissonUsers(user_sampling_prob=0.2, parts=9, group_size=2),
        noise("buffered"),
        Adjacency.ADD_REMOVE,
        "turns are not independent",
    ),
    (
        CyclicPoissonRecords(record_sampling_prob=0.2, parts=9, group_size=2),
        noise("inverse-square-root"),
        Adjacency.ADD_REMOVE,
        "turns are not independent",
    ),
    (
        CyclicPoissonRecords(record_sampling_prob=0.2, parts=9, group_size=2),
        noise(),
        FIXED_GRAPH[0],
        "no accounting rule",
    ),
    (ORDERED, noise(), Adjacency.ADD_REMOVE, "no accounting rule"),
    (
        PoissonUsers(user_sampling_prob=0.2, group_size=2),
        noise(),
        Adjacency.ADD_REMOVE,
        "cyclic-poisson",
    ),
    (
        PoissonRecords(record_sampling_prob=0.2, group_size=2),
        noise(),
        Adjacency.ADD_REMOVE,
        "cyclic-poisson",
    ),
]


@pytest.mark.parametrize(("sampler", "own", "adjacency", "match"), REFUSED)
def test_what_has_no_proof_cannot_be_planned(
    sampler: Sampler, own: Banded, adjacency: Adjacency, match: str
) -> None:
    with pytest.raises(UnaccountedPlanError, match=match):
        plan(sampler, own, adjacency=adjacency)


CYCLIC = CyclicPoissonRecords(record_sampling_prob=0.2, parts=4, group_size=2)

MORE_USERS = Hypothetical(num_users=5000, expected_groups=8.0)


@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        ({"steps": 13}, InputError, "12 steps, and the run has 13"),
        ({"clip": AdaptiveClip(clip_norm=1.0, count_noise=3.0)}, UnaccountedPlanError, "clip norm"),
        ({"mark": RecordLevel()}, UnaccountedPlanError, "priced as it runs"),
        ({"mark": MORE_USERS}, UnaccountedPlanError, "priced as it runs"),
        ({"update": Filter()}, UnaccountedPlanError, "no accounting rule"),
    ],
)
def test_what_correlated_noise_cannot_be_joined_with_is_refused(
    changed: dict[str, Any], error: type[Exception], match: str
) -> None:
    plan(CYCLIC, noise())
    with pytest.raises(error, match=match):
        plan(CYCLIC, noise(), **changed)


def test_noise_is_calibrated_to_epsilon() -> None:
    from userdp.sampling import PublicNumbers

    public = PublicNumbers(
        num_users=1000, num_records=4000, expected_groups=100.0, group_size=4, steps=40
    )
    found = Plan.of(
        CyclicPoissonUsers,
        public,
        own={"parts": 8},
        clip=FlatClip(clip_norm=1.0),
        noise=Banded.configured(steps=40, bands=8),
        epsilon=3.0,
        delta=1e-5,
    )
    assert found.epsilon() == pytest.approx(3.0, rel=2e-3)
    assert found.epsilon() <= 3.0
    assert isinstance(found.noise, Banded)
    assert Plan.from_json(found.to_json()) == found
    assert "correlated over bands=8" in found.statement().mechanism


@pytest.mark.statistical
def test_turns_of_a_part_are_independent_gaussians_after_mixing() -> None:
    # C w = z: what a user adds in its turns lies in disjoint rows of C, where the noise is
    # independent of standard deviation 1. 50,000 coordinates over 12 steps, 5 standard errors for
    # each of 78 covariances: failure 5e-5 in all for a fresh seed; seed 2.
    import torch

    from userdp.streams import RunSecret

    own, size = noise(), 50_000
    started, streams = own.started(), RunSecret.fixed_for_tests(2).streams("noise")
    rows = []
    for step in range(12):
        values = torch.zeros(size, dtype=torch.float64)
        started.add_(values, offset=0, size=size, noise_stddev=1.0, step=step, streams=streams)
        rows.append(values.numpy())
    matrix = np.linalg.inv(own.mixing(12))
    z = matrix @ np.stack(rows)
    covariance = z @ z.T / size
    assert np.abs(covariance - np.eye(12)).max() < 5 * math.sqrt(2 / size)
    for first in range(4):
        turns = matrix[:, first::4]
        overlaps = turns.T @ turns - np.diag((turns**2).sum(axis=0))
        assert np.abs(overlaps).max() == pytest.approx(0.0, abs=1e-12)
        assert (turns**2).sum(axis=0).max() <= 1


def test_bins_are_priced_by_what_their_columns_have_in_common_and_only_for_banded_strategies() -> (
    None
):
    sampler = BallsInBins(bins=6, group_size=2)
    event = plan(sampler, noise()).event()
    # The columns of one bin do not meet: two turns in twelve steps.
    assert event.gram[0] == pytest.approx(2.0, rel=3e-6)  # type: ignore[attr-defined]
    for refused in (noise("buffered"), noise("inverse-square-root")):
        with pytest.raises(UnaccountedPlanError, match="no price with sampler='balls-in-bins'"):
            plan(sampler, refused)
    with pytest.raises(UnaccountedPlanError, match="no accounting rule"):
        plan(sampler, noise(), adjacency=Adjacency.REPLACE)
