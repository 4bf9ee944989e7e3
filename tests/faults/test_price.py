"""What a plan says it costs is what an independent accountant says all of its steps cost."""

from __future__ import annotations

import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from userdp.plan import Plan


def library_epsilon(step: dp_event.DpEvent, steps: int, delta: float) -> float:
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(step, steps)
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize("steps", [1, 7, 30])
def test_plan_costs_what_dp_accounting_says_its_steps_cost(steps: int) -> None:
    plan = Plan.sample_users(
        num_users=100,
        expected_cohort_size=10,
        group_size=3,
        steps=30,
        clip_norm=0.5,
        noise_multiplier=1.5,
        delta=1e-4,
    )
    step = dp_event.PoissonSampledDpEvent(0.1, dp_event.GaussianDpEvent(1.5))
    expected = library_epsilon(step, steps, 1e-4)
    assert plan.epsilon(steps) == pytest.approx(expected, rel=2e-3)
    assert plan.statement(steps=steps).epsilon == plan.epsilon(steps)


def test_plan_of_records_costs_what_dp_accounting_says_of_its_mixture() -> None:
    plan = Plan.sample_records(
        num_users=100,
        expected_batch_size=20,
        group_size=2,
        steps=20,
        clip_norm=0.5,
        noise_multiplier=3.0,
        delta=1e-4,
    )
    # Two records, each in by its own coin of probability 0.1: the sum moves by 0, 1 or 2.
    step = dp_event.MixtureOfGaussiansDpEvent(3.0, [0.0, 1.0, 2.0], [0.81, 0.18, 0.01])
    assert plan.epsilon() == pytest.approx(library_epsilon(step, 20, 1e-4), rel=2e-3)
