"""The plan: the only place that joins parts, and what it refuses to join."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from userdp.clipping.rules import FlatClip, ScheduledClip
from userdp.errors import InputError, UnaccountedPlanError
from userdp.index import UserIndex
from userdp.noise import Banded
from userdp.noise.gaussian import Gaussian
from userdp.plan import Plan
from userdp.prices.marks import Hypothetical
from userdp.prices.table import event_of
from userdp.sampling import (
    Allocation,
    CappedPoissonUsers,
    Cohort,
    CyclicPoissonUsers,
    PoissonRecords,
    PoissonUsers,
    PublicNumbers,
    Sampler,
    WithoutReplacement,
)
from userdp.streams import RunSecret
from userdp.units import Adjacency


def sample_users(**changes: object) -> Plan:
    settings: dict[str, object] = {
        "num_users": 1000,
        "expected_cohort_size": 20,
        "group_size": 4,
        "steps": 50,
        "clip_norm": 0.5,
        "noise_multiplier": 1.5,
        "delta": 1e-5,
    }
    return Plan.sample_users(**(settings | changes))  # type: ignore[arg-type]


def sample_records(**changes: object) -> Plan:
    settings: dict[str, object] = {
        "num_users": 1000,
        "expected_batch_size": 20,
        "group_size": 4,
        "steps": 5,
        "clip_norm": 0.5,
        "noise_multiplier": 3.0,
        "delta": 1e-5,
    }
    return Plan.sample_records(**(settings | changes))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Shuffled:
    """A sampler somebody might write: fixed batches of a permutation."""

    user_sampling_prob: float
    group_size: int

    def limit_contributions(self, index: UserIndex, rng: np.random.Generator) -> UserIndex:
        return index

    def draw(self, index: UserIndex, rng: np.random.Generator) -> Cohort:
        return Cohort.of([])


@dataclass(frozen=True, kw_only=True)
class LouderGaussian(Gaussian):
    """A noise that calls itself a Gaussian."""


def test_pair_without_accounting_rule_cannot_be_built() -> None:
    parts = {
        "clip": FlatClip(clip_norm=1.0),
        "steps": 1,
        "divisor": 1.0,
        "num_users": 10,
        "delta": 1e-3,
    }
    with pytest.raises(
        UnaccountedPlanError,
        match=r"\(Shuffled\) with noise 'gaussian' \(Gaussian\) has no accounting",
    ):
        Plan(
            sampler=Shuffled(user_sampling_prob=0.1, group_size=1),  # type: ignore[arg-type]
            noise=Gaussian(noise_multiplier=1.0),
            **parts,  # type: ignore[arg-type]
        )
    with pytest.raises(UnaccountedPlanError, match="LouderGaussian"):
        Plan(
            sampler=PoissonUsers(user_sampling_prob=0.1, group_size=1),
            noise=LouderGaussian(noise_multiplier=1.0),
            **parts,  # type: ignore[arg-type]
        )


def test_subclass_of_a_sampler_inherits_no_rule() -> None:
    class Weighted(PoissonUsers):
        pass

    with pytest.raises(UnaccountedPlanError, match="Weighted"):
        event_of(
            Weighted(user_sampling_prob=0.1, group_size=1),
            Gaussian(noise_multiplier=1.0),
            Adjacency.ADD_REMOVE,
            steps=1,
        )


@pytest.mark.parametrize("make", [sample_users, sample_records])
@pytest.mark.parametrize("given", [{}, {"epsilon": 4.0, "noise_multiplier": 1.0}])
def test_exactly_one_of_epsilon_and_noise_multiplier(make, given: dict[str, float]) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match="exactly one of epsilon and noise_multiplier"):
        make(**({"epsilon": None, "noise_multiplier": None} | given))


def test_plan_for_an_epsilon_costs_at_most_that() -> None:
    plan = sample_users(noise_multiplier=None, epsilon=3.0)
    assert 2.99 < plan.epsilon() <= 3.0


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf])
def test_target_epsilon_must_be_positive_and_finite(epsilon: float) -> None:
    with pytest.raises(InputError, match="epsilon"):
        sample_users(noise_multiplier=None, epsilon=epsilon)


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_delta_must_be_a_probability(delta: float) -> None:
    with pytest.raises(InputError, match="delta"):
        sample_users(delta=delta)


def test_delta_above_one_over_n_is_refused_unless_nothing_is_promised() -> None:
    with pytest.raises(InputError, match=r"delta=0.002 is above 1/num_users=0.001.*smaller delta"):
        sample_users(delta=2e-3)
    assert sample_users(delta=1e-3).cautions() == []
    mark = Hypothetical(num_users=10_000, expected_groups=50.0)
    for promises_nothing, limit in (({"non_private": True}, "0.001:"), ({"mark": mark}, "0.0001:")):
        plan = sample_users(delta=2e-3, **promises_nothing)
        (caution,) = plan.cautions()
        assert f"1/num_users={limit}" in caution
        assert caution in plan.statement().cautions
        assert not plan.statement().guarantee


def test_a_record_with_a_delta_above_one_over_n_promises_nothing_and_says_why() -> None:
    plan = replace(sample_users(noise_multiplier=0.05), delta=0.5)
    statement = plan.statement()
    assert statement.epsilon < 1e9
    assert not statement.guarantee
    assert statement.promise == ""
    assert "No privacy guarantee: delta=0.5 is above 1/num_users=0.001" in statement.sentence
    assert statement.to_json()["epsilon"] is None


def test_a_number_of_users_far_from_those_asked_for_is_a_caution() -> None:
    # 2 users a step for 4 steps: 8 draws, of 800 users one in a hundred.
    few = dict[str, object](expected_cohort_size=2, steps=4, delta=1e-6)
    (caution,) = sample_users(num_users=801, **few).cautions()
    assert "num_users=801 is far from the 8 users" in caution
    assert sample_users(num_users=800, **few).cautions() == []


@pytest.mark.parametrize("expected", [0.5, 0.0, -1.0, 1001.0, math.nan, math.inf])
def test_expected_cohort_must_lie_between_one_and_everybody(expected: float) -> None:
    remedy = "Lower" if expected > 1000 else "Raise"
    with pytest.raises(InputError, match=rf"cohort_size=\S+ of 1,000 users.* {remedy} expected_c"):
        sample_users(expected_cohort_size=expected)
    with pytest.raises(InputError, match="expected_batch_size"):
        sample_records(expected_batch_size=expected if expected != 1001.0 else 4001.0)


@pytest.mark.parametrize("divisor", [0.5, 0.0, -3.0, math.nan, math.inf])
def test_divisor_must_be_a_number_from_one_up(divisor: float) -> None:
    with pytest.raises(InputError, match="expected groups"):
        Plan(
            sampler=PoissonUsers(user_sampling_prob=0.1, group_size=1),
            clip=FlatClip(clip_norm=1.0),
            noise=Gaussian(noise_multiplier=1.0),
            steps=1,
            divisor=divisor,
            num_users=10,
            delta=1e-3,
        )


@pytest.mark.parametrize("num_users", [0, 1, -5])
def test_one_user_cannot_hide(num_users: int) -> None:
    with pytest.raises(InputError, match="num_users"):
        sample_users(num_users=num_users, expected_cohort_size=1)


@pytest.mark.parametrize("steps", [0, -1])
def test_no_steps_is_refused(steps: int) -> None:
    with pytest.raises(InputError, match="steps"):
        sample_users(steps=steps)


@pytest.mark.parametrize(
    "open_door", [{"noise_multiplier": 0.0}, {"clip_norm": math.inf, "noise_multiplier": 1.0}]
)
def test_no_protection_needs_the_explicit_flag(open_door: dict[str, float]) -> None:
    with pytest.raises(InputError, match="protects nobody"):
        sample_users(**open_door)


def test_no_epsilon_is_a_target_of_a_run_that_claims_none() -> None:
    with pytest.raises(InputError, match="claims no epsilon"):
        sample_users(non_private=True, noise_multiplier=None, epsilon=8.0)


def test_noise_without_a_claim_says_so_and_has_no_price() -> None:
    statement = sample_users(non_private=True).statement()
    assert str(statement).startswith("trained with noise, no guarantee claimed.")
    assert not statement.guarantee
    assert statement.epsilon == math.inf
    assert statement.promise == ""
    assert statement.to_json()["planned_epsilon"] is None


def test_infinite_noise_is_refused_even_with_the_flag() -> None:
    # Noise is scaled to the clip norm: an infinite one would turn every weight into NaN.
    with pytest.raises(InputError, match="infinite"):
        sample_users(clip_norm=math.inf, noise_multiplier=1.0, non_private=True)


def test_non_private_plan_promises_nothing() -> None:
    plan = sample_users(noise_multiplier=0.0, non_private=True)
    assert plan.epsilon() == math.inf
    assert plan.epsilon(0) == 0.0


def test_public_numbers_give_rate_divisor_and_noise() -> None:
    users = sample_users()
    assert users.sampler == PoissonUsers(user_sampling_prob=0.02, group_size=4)
    assert users.divisor == 20
    assert users.noise_stddev == pytest.approx(0.75)
    records = sample_records()
    assert records.sampler == PoissonRecords(record_sampling_prob=20 / 4000, group_size=4)
    assert records.divisor == 20
    assert records.noise_stddev == pytest.approx(1.5)
    declared = sample_records(num_records=2500)
    assert declared.sampler == PoissonRecords(record_sampling_prob=20 / 2500, group_size=4)


def test_event_is_made_from_the_samplers_own_parameters() -> None:
    assert sample_users().event(7) == event_of(
        PoissonUsers(user_sampling_prob=0.02, group_size=99),
        Gaussian(noise_multiplier=1.5),
        Adjacency.ADD_REMOVE,
        steps=7,
    )
    assert sample_records().event(7) != event_of(
        PoissonRecords(record_sampling_prob=20 / 4000, group_size=5),
        Gaussian(noise_multiplier=3.0),
        Adjacency.ADD_REMOVE,
        steps=7,
    )


def test_epsilon_grows_with_the_steps_taken() -> None:
    plan = sample_users()
    spent = [plan.epsilon(steps) for steps in (0, 1, 10, 50)]
    assert spent == sorted(spent)
    assert spent[0] == 0.0
    assert spent[-1] == plan.epsilon()


@hypothesis.given(
    records=st.booleans(),
    rate=st.floats(1e-6, 1.0),
    group_size=st.integers(1, 10**6),
    clip_norm=st.floats(1e-9, 1e9),
    noise=st.floats(1e-3, 1e6),
    steps=st.integers(1, 10**9),
    divisor=st.floats(1.0, 1e12),
    num_users=st.integers(2, 10**12),
    delta=st.floats(1e-14, 0.5),
    adjacency=st.sampled_from(Adjacency),
)
def test_plan_survives_json(
    records: bool,
    rate: float,
    group_size: int,
    clip_norm: float,
    noise: float,
    steps: int,
    divisor: float,
    num_users: int,
    delta: float,
    adjacency: Adjacency,
) -> None:
    records = records or adjacency.fixed_graph
    plan = Plan(
        sampler=PoissonRecords(record_sampling_prob=rate, group_size=group_size)
        if records
        else PoissonUsers(user_sampling_prob=rate, group_size=group_size),
        clip=FlatClip(clip_norm=clip_norm),
        noise=Gaussian(noise_multiplier=noise),
        steps=steps,
        divisor=divisor,
        num_users=num_users,
        delta=delta,
        adjacency=adjacency,
    )
    text = json.dumps(plan.to_json(), allow_nan=False)
    assert Plan.from_json(json.loads(text)) == plan


def test_infinite_clip_norm_survives_json() -> None:
    plan = sample_users(clip_norm=math.inf, noise_multiplier=0.0, non_private=True)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json(), allow_nan=False))) == plan


@pytest.mark.parametrize(("part", "kind"), [("sampler", "Weighted"), ("noise", "Laplace")])
def test_json_of_unknown_parts_is_refused(part: str, kind: str) -> None:
    data = sample_users().to_json()
    data[part]["type"] = kind
    with pytest.raises(UnaccountedPlanError, match="no accounting rule"):
        Plan.from_json(data)


def test_an_allocation_of_another_length_makes_no_plan() -> None:
    public = PublicNumbers(
        num_users=100, num_records=100, expected_groups=10, group_size=1, steps=20
    )
    plan = Plan.of(
        Allocation, public, clip=FlatClip(clip_norm=1.0), noise_multiplier=1.0, delta=1e-3
    )
    assert plan.sampler == Allocation(steps=20, participations=2, group_size=1)
    # Users would take part more often than the price says.
    with pytest.raises(InputError, match="allocated to 20 steps, and the run has 30"):
        replace(plan, steps=30)
    assert plan.over(30).sampler == Allocation(steps=30, participations=3, group_size=1)


@pytest.mark.parametrize("kind", [CappedPoissonUsers, WithoutReplacement])
def test_a_price_that_depends_on_the_number_of_users_says_so(kind: type[Sampler]) -> None:
    public = PublicNumbers(
        num_users=100, num_records=100, expected_groups=10, group_size=1, steps=20
    )
    own = {"cap": 20} if kind is CappedPoissonUsers else {}
    plan = Plan.of(
        kind, public, own=own, clip=FlatClip(clip_norm=1.0), noise_multiplier=1.0, delta=1e-3
    )
    assumed = "no more than num_users=100 users are in the data: the price depends on it"
    assert assumed in plan.statement().assumptions
    plan.sampler.check_users(100)
    with pytest.raises(InputError, match="more users than num_users=100"):
        plan.sampler.check_users(101)
    with pytest.raises(InputError, match="more users than num_users=100"):
        plan.sampler.draw(
            UserIndex.from_owners(range(101)), 0, RunSecret.fixed_for_tests(0).streams("cohort")
        )


def test_a_clip_norm_that_changes_has_no_price_with_correlated_noise() -> None:
    clip = ScheduledClip(phases=((0, 1.0), (3, 0.5)))
    with pytest.raises(UnaccountedPlanError, match="changes the clip norm"):
        Plan.of(
            CyclicPoissonUsers,
            PublicNumbers(
                num_users=100, num_records=100, expected_groups=10, group_size=1, steps=6
            ),
            own={"parts": 2},
            clip=clip,
            noise=Banded.configured(steps=6, bands=2),
            noise_multiplier=1.0,
        )
