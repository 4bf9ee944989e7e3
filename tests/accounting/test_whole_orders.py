"""Prices of discrete Gaussian noise against sums over the lattice, and against dp_accounting."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant

from userdp.accounting import accountant, events, whole_orders
from userdp.errors import UnaccountedPlanError
from userdp.units import Adjacency

USERS = Adjacency.ADD_REMOVE


def run(rate: float, noise: float, steps: int) -> events.DpEvent:
    step = events.poisson_users_discrete(user_sampling_prob=rate, noise_multiplier=noise)
    return events.repeated(step, steps)


def gaussian_run(rate: float, noise: float, steps: int) -> events.DpEvent:
    step = events.poisson_users_gaussian(user_sampling_prob=rate, noise_multiplier=noise)
    return events.repeated(step, steps)


def log_masses(variance: float, shift: tuple[int, ...], reach: int) -> np.ndarray:
    """The log of the discrete Gaussian around `shift` on a cube of the lattice."""
    n = np.arange(-reach, reach + 1)
    total = math.log(np.exp(-(np.arange(-400, 401) ** 2.0) / (2 * variance)).sum())
    out = np.zeros(1)
    for moved in shift:
        out = np.add.outer(out, -((n - moved) ** 2.0) / (2 * variance) - total).ravel()
    return out


def pair(variance: float, shift: tuple[int, ...], rate: float) -> tuple[np.ndarray, np.ndarray]:
    """The logs of the outputs with the user, who is there with this chance, and without."""
    # A moment of order 8 lies around eight times the shift.
    reach = math.ceil(9 * math.sqrt(variance)) + 8 * max(map(abs, shift))
    nobody = log_masses(variance, (0,) * len(shift), reach)
    there = log_masses(variance, shift, reach)
    if rate == 1:
        return there, nobody
    return np.logaddexp(math.log1p(-rate) + nobody, math.log(rate) + there), nobody


SETTINGS = list(
    itertools.product([0.3, 1.0, 4.0, 30.0], [(1,), (2,), (1, 1), (1, -2)], [0.02, 0.4, 1.0])
)


@pytest.mark.parametrize(("variance", "shift", "rate"), SETTINGS)
def test_moments_are_those_of_sums_over_the_lattice_in_both_directions(
    variance: float, shift: tuple[int, ...], rate: float
) -> None:
    present, nobody = pair(variance, shift, rate)
    noise = math.sqrt(variance / sum(s * s for s in shift))
    for order in (2, 3, 5, 8):
        stated = (order - 1) * whole_orders._divergence(order, rate, noise)
        removed, added = (
            np.logaddexp.reduce(order * one + (1 - order) * other)
            for one, other in ((present, nobody), (nobody, present))
        )
        # The moment of a removed user is met, not only bounded.
        assert removed == pytest.approx(stated, rel=1e-6, abs=1e-12)
        assert added <= stated * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize(("variance", "shift", "rate"), SETTINGS)
@pytest.mark.parametrize("steps", [1, 3])
def test_epsilon_is_never_below_the_truth_on_the_lattice(
    variance: float, shift: tuple[int, ...], rate: float, steps: int
) -> None:
    if steps > 1 and len(shift) > 1:
        pytest.skip("the product lattice is too large")
    present, nobody = (np.exp(log) for log in pair(variance, shift, rate))
    kept = (present > 1e-14) | (nobody > 1e-14)
    p, q = present[kept], nobody[kept]
    if steps > 1 and len(p) > 120:
        order = np.argsort(-(p + q))[:120]
        p, q = p[order], q[order]
    all_p, all_q = p, q
    for _ in range(steps - 1):
        all_p, all_q = np.multiply.outer(all_p, p).ravel(), np.multiply.outer(all_q, q).ravel()
    noise = math.sqrt(variance / sum(s * s for s in shift))
    for delta in (1e-2, 1e-5):
        epsilon = accountant.epsilon(run(rate, noise, steps), delta=delta, adjacency=USERS)
        for one, other in ((all_p, all_q), (all_q, all_p)):
            # What was cut off only lowers these sums, so this can miss a fault but invents none.
            truth = np.maximum(one - math.exp(min(epsilon, 600)) * other, 0).sum()
            assert truth <= delta * (1 + 1e-9)


@pytest.mark.parametrize(
    ("rate", "noise", "steps", "delta"),
    [
        (0.01, 2.0, 2000, 1e-6),
        (0.01, 0.8, 2000, 1e-6),
        (1e-4, 0.6, 10_000, 1e-8),
        (0.3, 9, 40, 1e-9),
    ],
)
def test_epsilon_is_that_of_another_library_at_these_orders_and_above_the_gaussians(
    rate: float, noise: float, steps: int, delta: float
) -> None:
    found = accountant.evaluate(run(rate, noise, steps), delta=delta, adjacency=USERS)
    other = RdpAccountant(orders=list(whole_orders._ORDERS))
    other.compose(gaussian_run(rate, noise, steps))
    assert found.epsilon == pytest.approx(other.get_epsilon(delta), rel=1e-6)
    assert found.epsilon >= accountant.epsilon(
        gaussian_run(rate, noise, steps), delta=delta, adjacency=USERS
    )
    assert "whole orders" in found.certified_by


def test_without_sampling_it_is_concentrated_differential_privacy() -> None:
    # OpenDP 0.16.0, make_gaussian over integers, scale 5: map(2.0) is 0.08 = (2 / 5)^2 / 2.
    assert whole_orders._divergence(7, 1.0, 2.5) == pytest.approx(7 * 0.08, rel=1e-6)


def test_delta_of_an_epsilon_is_the_inverse() -> None:
    event = run(0.01, 1.0, 500)
    epsilon = accountant.epsilon(event, delta=1e-6, adjacency=USERS)
    (delta,) = accountant.deltas(event, epsilons=[epsilon], delta=1e-6, adjacency=USERS)
    assert delta == pytest.approx(1e-6, rel=1e-3)


def test_a_paid_look_and_discrete_steps_are_priced_together() -> None:
    look = dp_event.GaussianDpEvent(4.0)
    both = accountant.epsilon(
        events.combined([look, run(0.01, 1.0, 500)]), delta=1e-6, adjacency=USERS
    )
    alone = accountant.epsilon(run(0.01, 1.0, 500), delta=1e-6, adjacency=USERS)
    assert alone < both
    # Records have no whole orders here: halves of delta are added.
    records = events.poisson_records_gaussian(
        record_sampling_prob=0.01, group_size=3, noise_multiplier=2.0
    )
    added = accountant.evaluate(
        events.combined([records, run(0.01, 1.0, 500)]), delta=1e-6, adjacency=USERS
    )
    assert "basic composition" in added.certified_by
    assert added.epsilon > alone


def test_what_is_not_proven_is_refused() -> None:
    with pytest.raises(UnaccountedPlanError):
        accountant.epsilon(run(0.1, 1.0, 5), delta=1e-6, adjacency=Adjacency.REPLACE)
    nested = dp_event.PoissonSampledDpEvent(0.1, run(0.5, 1.0, 2))
    assert not accountant.can_price(nested, USERS)


def test_no_noise_costs_everything_and_nothing_costs_nothing() -> None:
    assert accountant.epsilon(run(0.1, 0.0, 5), delta=1e-6, adjacency=USERS) == math.inf
    assert accountant.epsilon(run(0.0, 1.0, 5), delta=1e-6, adjacency=USERS) == 0.0


def test_events_are_written_and_read_back() -> None:
    event = run(0.1, 1.0, 5)
    assert events.from_json(events.to_json(event)) == event
