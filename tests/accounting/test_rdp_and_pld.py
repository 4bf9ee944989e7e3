"""Tuning by random stopping beside training: two bounds by hand, and the smaller one told."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS

from userdp.accounting import accountant, best_of_runs, certificate, events, gaussian, rdp_and_pld
from userdp.errors import UnaccountedPlanError
from userdp.units import Adjacency

ADD_REMOVE = Adjacency.ADD_REMOVE
ORDERS = np.array(DEFAULT_RDP_ORDERS, dtype=float)
DELTA = 1e-5


def converted(divergences: np.ndarray, delta: float) -> float:
    """Epsilon of Renyi divergences at `ORDERS`: Canonne, Kamath and Steinke 2020, Prop. 12."""
    found = divergences + np.log1p(-1 / ORDERS) - np.log(delta * ORDERS) / (ORDERS - 1)
    return float(found.min())


def stopped_geometrically(run: np.ndarray, mean_runs: float) -> np.ndarray:
    """Papernot and Steinke 2022, Thm. 2 with eta = 1, gamma = 1 / mean: divergences at `ORDERS`."""
    constant = 2 * float(np.min((1 - 1 / ORDERS) * run + math.log(mean_runs) / ORDERS))
    found = run + constant + math.log(mean_runs) / (ORDERS - 1)
    # Divergences grow with the order, so a larger order's bound holds for the smaller ones.
    return np.minimum.accumulate(found[::-1])[::-1]


def gaussian_runs(noise: float, steps: int) -> events.DpEvent:
    step = events.poisson_users_gaussian(user_sampling_prob=1.0, noise_multiplier=noise)
    return events.repeated(step, steps)


# Noise of a tuning run and of the training run, and which of the two ways is the tighter one.
CASES = [(20.0, 20.0, "RDP for everything"), (120.0, 6.0, "basic composition")]


@pytest.mark.parametrize(("tuning_noise", "noise", "how"), CASES)
def test_tuning_and_training_cost_the_smaller_of_both_bounds_by_hand(
    tuning_noise: float, noise: float, how: str
):
    steps, mean_runs = 40, 8.0
    tuning = best_of_runs.randomly_stopped(gaussian_runs(tuning_noise, steps), mean_runs=mean_runs)
    training = gaussian_runs(noise, steps)
    found = accountant.evaluate(
        events.combined([tuning, training]), delta=DELTA, adjacency=ADD_REMOVE
    )
    tuned = stopped_geometrically(ORDERS * steps / (2 * tuning_noise**2), mean_runs)
    whole = converted(tuned + ORDERS * steps / (2 * noise**2), DELTA)
    halves = converted(tuned, DELTA / 2) + gaussian.epsilon(math.sqrt(steps) / noise, DELTA / 2)
    assert found.epsilon == pytest.approx(min(whole, halves), rel=1e-5)
    assert max(whole, halves) > 1.01 * min(whole, halves), "the case does not tell them apart"
    assert how in found.certified_by
    for alone in (tuning, training):
        assert found.epsilon > accountant.epsilon(alone, delta=DELTA, adjacency=ADD_REMOVE)


def sampled(group_size: int, noise: float, steps: int = 50) -> events.DpEvent:
    step = events.poisson_records_gaussian(
        record_sampling_prob=0.1, group_size=group_size, noise_multiplier=noise
    )
    return events.repeated(step, steps)


@pytest.mark.slow
@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize("shape", [best_of_runs.LOGARITHMIC, best_of_runs.POISSON])
def test_sampled_training_after_tuning_costs_more_than_either_and_at_most_their_sum(
    group_size: int, shape: float
):
    tuning = best_of_runs.randomly_stopped(sampled(1, 3.0), mean_runs=5.0, shape=shape)
    look, training = dp_event.GaussianDpEvent(8.0), sampled(group_size, 3.0)
    event = events.combined([look, events.combined([tuning, training])])

    def at(part: events.DpEvent, delta: float) -> float:
        return accountant.epsilon(part, delta=delta, adjacency=ADD_REMOVE)

    found = at(event, DELTA)
    assert found > max(at(tuning, DELTA), at(events.combined([look, training]), DELTA))
    halves = at(tuning, DELTA / 2) + at(events.combined([look, training]), DELTA / 2)
    if group_size == 1:
        assert found < halves, "all of it has an RDP rule"
    else:
        assert found == halves, "sampled records have none in the library"


@pytest.mark.parametrize("group_size", [1, 4])
def test_the_curve_of_delta_is_above_that_of_training_alone_and_meets_the_told_epsilon(
    group_size: int,
):
    training = sampled(group_size, 3.0)
    tuning = best_of_runs.randomly_stopped(sampled(1, 3.0), mean_runs=5.0)
    event = events.combined([tuning, training])
    told = accountant.epsilon(event, delta=DELTA, adjacency=ADD_REMOVE)
    # Out of order on purpose.
    epsilons = [told, 0.0, told / 2, 1.2 * told]
    found = accountant.deltas(event, epsilons=epsilons, delta=DELTA, adjacency=ADD_REMOVE)
    alone = certificate.deltas(training, epsilons=epsilons, adjacency=ADD_REMOVE)
    assert all(one >= other for one, other in zip(found, alone, strict=True))
    assert found[3] <= found[0] <= found[2] <= found[1] <= 1
    assert found[0] == pytest.approx(DELTA, rel=0.02)


def test_tuning_of_runs_without_an_rdp_rule_is_refused():
    tuning = best_of_runs.randomly_stopped(sampled(4, 3.0), mean_runs=5.0)
    for event in (tuning, events.combined([tuning, sampled(1, 3.0)])):
        assert not accountant.can_price(event, ADD_REMOVE)
        with pytest.raises(UnaccountedPlanError, match=r"cannot price .*RepeatAndSelect"):
            accountant.evaluate(event, delta=DELTA, adjacency=ADD_REMOVE)


def test_what_has_a_privacy_loss_distribution_is_never_priced_by_rdp():
    found = accountant.evaluate(sampled(1, 3.0), delta=DELTA, adjacency=ADD_REMOVE)
    assert "RDP" not in found.certified_by
    by_rdp = rdp_and_pld.evaluate(sampled(1, 3.0), delta=DELTA, adjacency=ADD_REMOVE)
    assert by_rdp.epsilon > 0.999 * found.epsilon


def test_tuning_under_replace_counts_twice_the_distance():
    tuning = best_of_runs.randomly_stopped(dp_event.GaussianDpEvent(8.0), mean_runs=5.0)
    nearer = best_of_runs.randomly_stopped(dp_event.GaussianDpEvent(4.0), mean_runs=5.0)
    assert accountant.epsilon(tuning, delta=DELTA, adjacency=Adjacency.REPLACE) == pytest.approx(
        accountant.epsilon(nearer, delta=DELTA, adjacency=ADD_REMOVE), rel=1e-9
    )
