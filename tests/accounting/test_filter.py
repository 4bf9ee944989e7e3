"""The filter of Asi and Liu: how it splits its budget."""

from __future__ import annotations

import math

import pytest
from dp_accounting import dp_event

from userdp.accounting import accountant, events, filter
from userdp.units import Adjacency


def test_filter_splits_the_budget_in_halves():
    plan = filter.filter_plan(epsilon=3.0, delta=1e-5, steps=100, num_users=1000, concentration=0.1)
    event = events.repeated(dp_event.GaussianDpEvent(plan.noise_multiplier), 100)
    spent = accountant.epsilon(event, delta=plan.delta / 2, adjacency=Adjacency.ADD_REMOVE)
    assert spent == pytest.approx(plan.epsilon / 2, rel=1e-3)
    variance = 8 * 0.1**2 * math.log(math.exp(3.0) * 100 / 1e-5) * plan.noise_multiplier**2 / 1e6
    assert plan.noise_stddev == pytest.approx(math.sqrt(variance))
