"""Tuning by random stopping beside training: two bounds by hand, and the smaller one told."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS
from scipy import stats

from userdp.accounting import accountant, certificate, events, gaussian, mixed, renyi, selection
from userdp.errors import InputError, UnaccountedPlanError
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
    tuning = selection.randomly_stopped(gaussian_runs(tuning_noise, steps), mean_runs=mean_runs)
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


@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize("shape", [selection.LOGARITHMIC, selection.POISSON])
def test_sampled_training_after_tuning_costs_more_than_either_and_at_most_their_sum(
    group_size: int, shape: float
):
    tuning = selection.randomly_stopped(sampled(1, 3.0), mean_runs=5.0, shape=shape)
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


def test_best_of_one_run_costs_at_least_that_run():
    run = gaussian_runs(20.0, 40)
    best = selection.randomly_stopped(run, mean_runs=1.0)
    assert accountant.epsilon(best, delta=DELTA, adjacency=ADD_REMOVE) >= accountant.epsilon(
        run, delta=DELTA, adjacency=ADD_REMOVE
    )


@pytest.mark.parametrize("group_size", [1, 4])
def test_the_curve_of_delta_is_above_that_of_training_alone_and_meets_the_told_epsilon(
    group_size: int,
):
    training = sampled(group_size, 3.0)
    tuning = selection.randomly_stopped(sampled(1, 3.0), mean_runs=5.0)
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
    tuning = selection.randomly_stopped(sampled(4, 3.0), mean_runs=5.0)
    for event in (tuning, events.combined([tuning, sampled(1, 3.0)])):
        assert not accountant.can_price(event, ADD_REMOVE)
        with pytest.raises(UnaccountedPlanError, match=r"cannot price .*RepeatAndSelect"):
            accountant.evaluate(event, delta=DELTA, adjacency=ADD_REMOVE)


def test_what_has_a_privacy_loss_distribution_is_never_priced_by_rdp():
    found = accountant.evaluate(sampled(1, 3.0), delta=DELTA, adjacency=ADD_REMOVE)
    assert "RDP" not in found.certified_by
    assert mixed.evaluate(sampled(1, 3.0), delta=DELTA, adjacency=ADD_REMOVE).epsilon > 0.999 * (
        found.epsilon
    )


# Replacing moves the sum by two clip norms: the exact cost is that of half the noise.
@pytest.mark.parametrize(
    "event",
    [
        dp_event.GaussianDpEvent(8.0),
        dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(16.0), 4),
        dp_event.ComposedDpEvent([dp_event.GaussianDpEvent(16.0)] * 4),
        # A cohort of everybody is no sampling at all.
        events.fixed_size_users_gaussian(num_users=50, cohort_size=50, noise_multiplier=8.0),
    ],
)
def test_rdp_under_replace_is_above_the_exact_cost_of_replacing(event: events.DpEvent):
    found = renyi.evaluation(event, delta=DELTA, adjacency=Adjacency.REPLACE).epsilon
    exact = gaussian.epsilon(2 / 8.0, DELTA)
    assert exact <= found <= 1.2 * exact


def test_tuning_under_replace_counts_twice_the_distance():
    tuning = selection.randomly_stopped(dp_event.GaussianDpEvent(8.0), mean_runs=5.0)
    nearer = selection.randomly_stopped(dp_event.GaussianDpEvent(4.0), mean_runs=5.0)
    assert accountant.epsilon(tuning, delta=DELTA, adjacency=Adjacency.REPLACE) == pytest.approx(
        accountant.epsilon(nearer, delta=DELTA, adjacency=ADD_REMOVE), rel=1e-9
    )


def test_laplace_under_replace_counts_twice_the_distance():
    # Pure epsilon 1/4 for adding a user, 1/2 for replacing one; a Laplace loss is bounded by it.
    found = renyi.evaluation(
        dp_event.LaplaceDpEvent(4.0), delta=1e-12, adjacency=Adjacency.REPLACE
    ).epsilon
    assert 0.49 <= found <= 0.55


@pytest.mark.statistical
@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 3.0, math.inf])
def test_number_of_runs_follows_the_priced_distribution(shape: float):
    # Seed 11, 4,000 draws, a chi-squared test of the counts of 0, 1, ... 11 and more: fails for a
    # right distribution with probability 1e-4 a shape.
    mean_runs = 4.0
    rng = np.random.default_rng(11)
    drawn = [
        selection.number_of_runs(mean_runs=mean_runs, shape=shape, rng=rng) for _ in range(4000)
    ]
    gamma = 0.0 if math.isinf(shape) else selection._stopping_probability(mean_runs, shape)
    at = np.arange(12)
    chances = {
        0.0: stats.logser(1 - gamma) if shape == 0 else None,
        math.inf: stats.poisson(mean_runs),
    }.get(shape) or stats.nbinom(shape, gamma)
    expected = chances.pmf(at)
    if not math.isinf(shape):
        expected[0] = 0.0
        if shape > 0:
            expected /= 1 - chances.pmf(0)
    expected = np.append(expected, 1 - expected.sum())
    counts = np.bincount(np.minimum(drawn, 12), minlength=13)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    assert stats.chisquare(counts[kept], 4000 * expected[kept]).pvalue > 1e-4


@pytest.mark.parametrize(("mean_runs", "shape"), [(0.5, 1.0), (math.inf, 1.0), (4.0, -0.5)])
def test_impossible_numbers_of_runs_are_refused(mean_runs: float, shape: float):
    with pytest.raises(InputError, match=r"mean_runs=|shape="):
        selection.randomly_stopped(gaussian_runs(1.0, 1), mean_runs=mean_runs, shape=shape)
    with pytest.raises(InputError, match=r"mean_runs=|shape="):
        selection.number_of_runs(mean_runs=mean_runs, shape=shape, rng=np.random.default_rng(0))
