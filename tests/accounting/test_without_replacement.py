"""Sampling without replacement: never below brute force, exact against the worst other users."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from oracles import hockey_stick
from scipy import stats

from userdp.accounting import accountant, events, gaussian, renyi, steps
from userdp.accounting.discretise import Focus, discretise
from userdp.accounting.pair import Direction
from userdp.accounting.prepared import prepare
from userdp.accounting.search import delta_bound
from userdp.errors import InputError
from userdp.units import Adjacency

ALL = (Adjacency.ADD_REMOVE, Adjacency.ZERO_OUT, Adjacency.REPLACE)


def step(places: int, cohort: int, noise: float) -> events.DpEvent:
    return events.without_replacement_gaussian(
        num_users=places, cohort_size=cohort, noise_multiplier=noise
    )


def _density(updates, cohort: int, noise: float):
    """The outputs of one step, by brute force over all cohorts."""
    sums = [sum(chosen) for chosen in combinations(updates, cohort)]
    return lambda x: float(np.mean(stats.norm.pdf(x, sums, noise)))


def _bound(event: events.DpEvent, adjacency: Adjacency, epsilon: float) -> float:
    mechanism = steps.of(event, adjacency)
    assert mechanism is not None
    return delta_bound(mechanism, epsilon, hint=1e-6)


@pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_others_say_the_price_covers_it(seed: int, adjacency: Adjacency):
    rng = np.random.default_rng(seed)
    places, cohort = [(4, 1), (4, 3), (5, 2), (3, 1)][seed]
    noise = (0.7, 1.5)[seed % 2]
    others = rng.uniform(-1, 1, places - 1)
    before, after = rng.uniform(-1, 1, 2) if adjacency is Adjacency.REPLACE else (1.0, 0.0)
    event = step(places, cohort, noise)
    one, other = (_density([user, *others], cohort, noise) for user in (before, after))
    for epsilon in (0.05, 0.5, 1.5):
        found = _bound(event, adjacency, epsilon)
        points = np.linspace(-6, 6, 13)
        for first, second in ((one, other), (other, one)):
            assert hockey_stick(first, second, epsilon, points) <= found * (1 + 1e-7)


@pytest.mark.parametrize("noise", [0.6, 1.0, 3.0])
def test_others_who_pull_against_the_user_are_the_worst_case(noise: float):
    # Everybody else pulls the other way, so a user who is drawn replaces one of them.
    places, cohort = 5, 2
    points = np.linspace(-8, 8, 17)
    away = _density([1.0, -1, -1, -1, -1], cohort, noise)
    absent = _density([0.0, -1, -1, -1, -1], cohort, noise)
    other = _density([-1.0, -1, -1, -1, -1], cohort, noise)
    for epsilon in (0.05, 0.3):
        removed = hockey_stick(away, absent, epsilon, points)
        found = _bound(step(places, cohort, noise), Adjacency.ZERO_OUT, epsilon)
        assert removed * (1 - 1e-7) <= found <= removed * 1.002
        replaced = hockey_stick(away, other, epsilon, points)
        found = _bound(step(places, cohort, noise), Adjacency.REPLACE, epsilon)
        assert replaced * (1 - 1e-7) <= found <= replaced * 1.002


@pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE])
@pytest.mark.parametrize("way", list(Direction))
def test_both_directions_on_a_grid_dominate_and_are_close(adjacency: Adjacency, way: Direction):
    noise, rate = 0.8, 0.4
    (one,) = prepare(steps.of(step(5, 2, noise), adjacency) or [], 1e-6)
    focus = Focus(epsilon=0.5, tilt=3.0, spacing=1e-3, allowed=1e-6, resolution=1e-3)
    branch = one.branches[0]
    atoms = discretise(branch.pair, branch.quadrature, way, count=1, focus=focus)
    loss = atoms.spacing * atoms.index + atoms.slack
    replaces = adjacency is Adjacency.REPLACE
    far, near = (1, 0) if way is Direction.ADD and not replaces else (2, 0 if replaces else 1)

    def mixed(shift: float):
        return lambda x: (
            (1 - rate) * stats.norm.pdf(x, 0, noise) + rate * stats.norm.pdf(x, shift, noise)
        )

    for epsilon in (0.0, 0.1, 0.4, 1.0):
        over = loss > epsilon
        found = float((atoms.mass[over] * -np.expm1(epsilon - loss[over])).sum()) + atoms.infinite
        true = hockey_stick(mixed(far), mixed(near), epsilon, np.linspace(-6, 6, 13))
        assert true * (1 - 1e-7) <= found <= true * 1.003
    assert float(atoms.mass.sum()) + atoms.infinite == pytest.approx(1.0, abs=1e-9)


def test_everybody_in_every_step_is_the_gaussian_mechanism():
    run = events.repeated(step(7, 7, 2.0), 4)
    for adjacency, distance in ((Adjacency.ADD_REMOVE, 1.0), (Adjacency.REPLACE, 2.0)):
        found = accountant.epsilon(run, delta=1e-6, adjacency=adjacency)
        assert found == pytest.approx(gaussian.epsilon(distance, 1e-6), rel=1e-5)


@pytest.mark.parametrize("noise", [0.8, 2.0, 8.0])
def test_below_the_rdp_rule_of_dp_accounting_and_above_poisson(noise: float):
    users, cohort, many, delta = 1000, 20, 300, 1e-6
    run = events.repeated(step(users, cohort, noise), many)
    older = events.repeated(
        events.fixed_size_users_gaussian(
            num_users=users, cohort_size=cohort, noise_multiplier=noise
        ),
        many,
    )
    replaced = accountant.epsilon(run, delta=delta, adjacency=Adjacency.REPLACE)
    assert replaced < renyi.evaluation(older, delta=delta, adjacency=Adjacency.REPLACE).epsilon
    poisson = events.repeated(
        events.poisson_users_gaussian(user_sampling_prob=cohort / users, noise_multiplier=noise),
        many,
    )
    removed = accountant.epsilon(run, delta=delta, adjacency=Adjacency.ADD_REMOVE)
    # The user who is pushed out is what sampling without replacement costs.
    assert accountant.epsilon(poisson, delta=delta, adjacency=Adjacency.ADD_REMOVE) < removed
    assert removed < replaced


@pytest.mark.statistical
def test_never_below_a_simulation_of_many_steps():
    # Seed 5. Lower bounds of Maurer and Pontil 2009 that fail with probability 1e-6 each.
    places, cohort, noise, many, delta, samples = 6, 2, 1.2, 5, 0.02, 200_000
    run = events.repeated(step(places, cohort, noise), many)
    rng = np.random.default_rng(5)
    log = math.log(2 / 1e-6)
    for before, after, adjacency in ((1, 0, "zero-out"), (0, 1, "zero-out"), (1, -1, "replace")):
        found = accountant.epsilon(run, delta=delta, adjacency=Adjacency(adjacency))
        drawn = rng.random((samples, many)) < cohort / places
        x = np.where(drawn, before, -1) + noise * rng.normal(size=drawn.shape)
        rate = cohort / places

        def density(user: float, x=x, rate=rate):
            drawn_in = rate * stats.norm.pdf(x, user, noise)
            return drawn_in + (1 - rate) * stats.norm.pdf(x, -1, noise)

        losses = np.log(density(before) / density(after)).sum(axis=1)
        values = -np.expm1(np.minimum(found - losses, 0.0))
        margin = math.sqrt(2 * values.var(ddof=1) * log / samples) + 7 * log / (3 * samples)
        assert values.mean() - margin <= delta


def test_larger_cohorts_cost_more_and_noise_costs_less():
    def epsilon(cohort: int, noise: float) -> float:
        run = events.repeated(step(100, cohort, noise), 20)
        return accountant.epsilon(run, delta=1e-6, adjacency=Adjacency.ZERO_OUT)

    by_cohort = [epsilon(cohort, 1.5) for cohort in (1, 5, 50, 99, 100)]
    assert by_cohort == sorted(by_cohort)
    by_noise = [epsilon(5, noise) for noise in (0.1, 0.5, 2.0, 100.0, 1e6)]
    assert by_noise == sorted(by_noise, reverse=True)


def test_calibrated_noise_meets_the_target():
    for adjacency in ALL:
        noise = accountant.calibrate(
            lambda noise: events.repeated(step(1000, 30, noise), 200),
            target=2.0, delta=1e-6, adjacency=adjacency,
        )  # fmt: skip
        run = events.repeated(step(1000, 30, noise), 200)
        assert 1.998 < accountant.epsilon(run, delta=1e-6, adjacency=adjacency) <= 2.0


@pytest.mark.parametrize("cohort", [0, 11])
def test_impossible_cohorts_are_refused(cohort: int):
    with pytest.raises(InputError, match="cohort_size"):
        step(10, cohort, 1.0)


@pytest.mark.parametrize("adjacency", ALL)
@pytest.mark.parametrize(("places", "noise"), [(10**6, 1.0), (10**9, 1.0), (10**9, 50.0)])
def test_a_user_who_is_hardly_ever_drawn_has_a_price(
    places: int, noise: float, adjacency: Adjacency
):
    # No loss of one tail is large enough to be kept: this ended in an error of numpy.
    found = accountant.epsilon(step(places, 1, noise), delta=1e-15, adjacency=adjacency)
    far, near = (2.0, 0.0) if adjacency is Adjacency.REPLACE else (2.0, 1.0)
    outputs = np.linspace(-5 * noise, 12 * noise, 1000)
    most = math.exp(found) * stats.norm.sf(outputs, near, noise)
    gained = (stats.norm.sf(outputs, far, noise) - most) / places
    gained -= math.expm1(found) * (1 - 1 / places) * stats.norm.sf(outputs, 0.0, noise)
    assert gained.max() <= 1e-15
