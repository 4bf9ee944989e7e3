"""What is told to people: certified, never above a target, honest where it cannot be."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from test_search import random_setting

from userdp.accounting import accountant, best_of_runs, certificate, events, search
from userdp.errors import InputError, UnaccountedPlanError
from userdp.units import Adjacency

ADD_REMOVE = Adjacency.ADD_REMOVE


def records(group: int, rate: float, steps: int):
    return lambda sigma: events.repeated(
        events.poisson_records_gaussian(
            record_sampling_prob=rate, group_size=group, noise_multiplier=sigma
        ),
        steps,
    )


def test_example_of_the_contract_is_25_60():
    found = accountant.evaluate(records(16, 0.01, 2000)(2.0), delta=1e-6, adjacency=ADD_REMOVE)
    assert found.epsilon == pytest.approx(25.598, rel=1e-3)
    assert "dp_accounting" in found.certified_by
    assert "userdp" in found.certified_by


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 500))]
)
def test_random_settings_agree_with_dp_accounting_within_one_percent(seed: int):
    step, delta = random_setting(np.random.default_rng(1000 + seed))
    event = dp_event.SelfComposedDpEvent(
        dp_event.MixtureOfGaussiansDpEvent(
            step.noise, step.shifts.tolist(), (step.weights / step.weights.sum()).tolist()
        ),
        step.count,
    )
    ours = search.epsilon_bound([step], delta)
    interval, _ = search.interval_for([step], max(ours, 1e-3), delta, 1e-3)
    theirs = PLDAccountant(value_discretization_interval=interval)
    theirs.compose(event)
    assert ours == pytest.approx(float(theirs.get_epsilon(delta)), rel=1e-2, abs=1e-4)


@pytest.mark.parametrize(
    ("group", "rate", "steps", "target", "delta"),
    [(1, 0.01, 2000, 1.0, 1e-6), (16, 0.01, 500, 8.0, 1e-6), (256, 0.02, 100, 4.0, 1e-9),
     (1, 1.0, 1, 1.0, 1e-6), (1, 0.5, 1, 3.0, 1e-4), (4, 0.1, 300, 0.1, 1e-12)],
)  # fmt: skip
def test_calibrated_epsilon_is_at_most_the_target_and_within_a_thousandth(
    group, rate, steps, target, delta
):
    event_of = records(group, rate, steps)
    sigma = accountant.calibrate(event_of, target=target, delta=delta, adjacency=ADD_REMOVE)
    reached = accountant.epsilon(event_of(sigma), delta=delta, adjacency=ADD_REMOVE)
    assert 0.999 * target <= reached <= target


@pytest.mark.parametrize("look", [None, dp_event.GaussianDpEvent(3.0)])
def test_calibration_makes_up_for_a_certificate_above_the_search(look, monkeypatch):
    # A release of fixed noise beside the steps: more noise on the steps lowers epsilon but little.
    def event_of(sigma: float) -> events.DpEvent:
        steps = records(1, 0.1, 50)(sigma)
        return steps if look is None else events.combined([look, steps])

    def pessimistic(event: events.DpEvent, **at) -> float:
        return 1.003 * certificate.evaluate(event, **at).epsilon

    monkeypatch.setattr(accountant, "epsilon", pessimistic)
    sigma = accountant.calibrate(event_of, target=2.0, delta=1e-4, adjacency=ADD_REMOVE)
    assert 0.999 * 2 <= pessimistic(event_of(sigma), delta=1e-4, adjacency=ADD_REMOVE) <= 2


@pytest.mark.parametrize(("delta", "noise"), [(1e-20, 2.0), (1e-15, 2.0), (1e-6, 0.9)])
def test_where_the_library_cannot_our_own_bound_stands_and_says_so(delta, noise):
    group = 16 if delta < 1e-10 else 64
    found = accountant.evaluate(
        records(group, 0.01, 2000)(noise), delta=delta, adjacency=ADD_REMOVE
    )
    assert math.isfinite(found.epsilon)
    assert found.certified_by.startswith(certificate.own())
    assert "cannot" in found.certified_by
    assert 0 < found.error_bound < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "steps"), [(1e-5, 1000), (0.05, 1000), (2.0, 200_000)])
def test_no_error_bound_is_stated_where_none_was_measured(noise, steps):
    found = accountant.evaluate(records(1, 0.01, steps)(noise), delta=1e-6, adjacency=ADD_REMOVE)
    assert found.error_bound == math.inf


def test_unachievable_target_says_what_is_feasible():
    with pytest.raises(InputError, match=r"gives no less than 0\.\d+"):
        accountant.calibrate(
            records(1, 1.0, 10**13), target=0.001, delta=1e-6, adjacency=ADD_REMOVE
        )


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf, 1e-9])
def test_impossible_targets_are_refused(target: float):
    with pytest.raises(InputError, match="epsilon="):
        accountant.calibrate(records(1, 0.1, 10), target=target, delta=1e-6, adjacency=ADD_REMOVE)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-6, math.nan, 1e-300])
def test_impossible_deltas_are_refused(delta: float):
    with pytest.raises(InputError, match="delta="):
        accountant.epsilon(records(1, 0.1, 10)(1.0), delta=delta, adjacency=ADD_REMOVE)


def test_zero_out_costs_what_add_remove_costs():
    event = records(4, 0.01, 200)(1.0)
    assert accountant.epsilon(event, delta=1e-6, adjacency=Adjacency.ZERO_OUT) == pytest.approx(
        accountant.epsilon(event, delta=1e-6, adjacency=ADD_REMOVE), rel=1e-12
    )


@pytest.mark.parametrize("group", [1, 4])
def test_replace_costs_more_than_add_remove(group: int):
    event = records(group, 0.01, 200)(2.0)
    replace = accountant.epsilon(event, delta=1e-6, adjacency=Adjacency.REPLACE)
    assert replace > 1.5 * accountant.epsilon(event, delta=1e-6, adjacency=ADD_REMOVE)


def test_replace_of_users_without_sampling_is_the_gaussian_at_twice_the_distance():
    event = dp_event.GaussianDpEvent(4.0)
    half = dp_event.GaussianDpEvent(2.0)
    assert accountant.epsilon(event, delta=1e-6, adjacency=Adjacency.REPLACE) == pytest.approx(
        accountant.epsilon(half, delta=1e-6, adjacency=ADD_REMOVE), rel=1e-3
    )


def test_capped_cohorts_cost_a_little_more_than_plain_poisson():
    def capped(cap: int) -> float:
        step = events.capped_poisson_users_gaussian(
            user_sampling_prob=0.01, cap=cap, num_users=5000, noise_multiplier=2.0
        )
        return accountant.epsilon(events.repeated(step, 50), delta=1e-6, adjacency=ADD_REMOVE)

    plain = accountant.epsilon(records(1, 0.01, 50)(2.0), delta=1e-6, adjacency=ADD_REMOVE)
    assert plain * 0.999 <= capped(200) < capped(70) < capped(55)


def test_an_event_without_a_rule_is_refused():
    event = events.fixed_size_users_gaussian(num_users=100, cohort_size=10, noise_multiplier=1.0)
    with pytest.raises(UnaccountedPlanError, match="SampledWithoutReplacement"):
        accountant.epsilon(event, delta=1e-6, adjacency=ADD_REMOVE)


def test_a_sweep_of_ten_runs_costs_the_composition():

    run = records(1, 0.01, 100)(1.0)
    swept = accountant.epsilon(best_of_runs.swept(run, 10), delta=1e-6, adjacency=ADD_REMOVE)
    longer = accountant.epsilon(records(1, 0.01, 1000)(1.0), delta=1e-6, adjacency=ADD_REMOVE)
    assert swept == pytest.approx(longer, rel=1e-3)


def test_reading_an_epsilon_twice_gives_the_same_number():
    event = records(2, 0.05, 50)(1.0)
    first = accountant.evaluate(event, delta=1e-6, adjacency=ADD_REMOVE)
    assert accountant.evaluate(event, delta=1e-6, adjacency=ADD_REMOVE) == first


def test_paid_planning_and_training_compose_exactly():
    training = events.repeated(
        events.poisson_users_gaussian(user_sampling_prob=0.01, noise_multiplier=1.0), 200
    )
    both = events.combined([training, dp_event.GaussianDpEvent(20.0)])
    alone = accountant.epsilon(training, delta=1e-6, adjacency=Adjacency.ADD_REMOVE)
    together = accountant.epsilon(both, delta=1e-6, adjacency=Adjacency.ADD_REMOVE)
    assert alone < together < alone + 0.3
