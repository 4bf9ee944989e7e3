"""Random allocation: exact where a closed form exists, never below the truth, close to it."""

from __future__ import annotations

import math

import monte_carlo
import numpy as np
import pytest
from dp_accounting import dp_event
from scipy import integrate, stats

from userdp.accounting import accountant, events, gaussian, steps
from userdp.accounting.search import delta_bound
from userdp.errors import InputError, UnaccountedPlanError
from userdp.units import Adjacency

ADD_REMOVE = Adjacency.ADD_REMOVE


def epsilon(noise: float, of: int, participations: int, delta: float) -> float:
    event = events.random_allocation_gaussian(
        steps=of, participations=participations, noise_multiplier=noise
    )
    return accountant.epsilon(event, delta=delta, adjacency=ADD_REMOVE)


# sigma, T, k, delta; then the upper and the lower bound of PLD_accounting 2.0 (PyPI), by its
# gaussian_allocation_epsilon_range(sigma=, num_steps=, num_selected=, delta=).
PLD_ACCOUNTING = [
    (1.0, 100, 10, 1e-6, 6.943713495208076, 6.858348117975636),
    (1.0, 100, 1, 1e-6, 0.8744979111842018, 0.8436711728211483),
    (0.5, 1000, 1, 1e-6, 4.11757156839119, 4.098446332149426),
    (2.0, 1000, 10, 1e-8, 0.8740912167403119, 0.8379103212897022),
    (0.8, 2000, 5, 1e-5, 0.9960721795621946, 0.9552816799979582),
    (5.0, 10_000, 100, 1e-10, 1.2185853352170268, 1.1700925604485568),
    (0.4, 100, 3, 1e-4, 14.487812381367933, 14.417097188503083),
    (1.0, 10_000, 1, 1e-6, 0.04697738098344166, 0.0449641541439451),
    (3.0, 500, 50, 1e-6, 3.656486177843141, 3.5666529849704456),
    (10.0, 1000, 100, 1e-5, 1.2293433808870768, 1.1755538863728765),
    (0.3, 1000, 10, 1e-6, 59.73204882904171, 59.60187531019316),
    (0.6, 50, 7, 1e-9, 22.778420396537996, 22.71118221837037),
]


@pytest.mark.parametrize(("noise", "of", "k", "delta", "upper", "lower"), PLD_ACCOUNTING)
def test_between_the_bounds_of_another_library(noise, of, k, delta, upper, lower):
    assert lower < epsilon(noise, of, k, delta) < upper


@pytest.mark.slow
def test_between_the_bounds_of_another_library_if_it_is_installed():
    library = pytest.importorskip("PLD_accounting")
    upper, lower = library.gaussian_allocation_epsilon_range(
        delta=1e-6, sigma=1.5, num_steps=60, num_selected=4
    )
    assert lower < epsilon(1.5, 60, 4, 1e-6) < upper


def test_one_place_is_the_gaussian_mechanism():
    assert epsilon(1.3, 1, 1, 1e-7) == gaussian.epsilon(1 / 1.3, 1e-7)
    # In every step: nothing is left to chance.
    assert epsilon(1.3, 9, 9, 1e-7) == pytest.approx(gaussian.epsilon(3 / 1.3, 1e-7))


def _call(share: np.ndarray, level: np.ndarray, noise: float) -> np.ndarray:
    """E (share Y - level)+ for one Gaussian ratio Y, in closed form."""
    with np.errstate(divide="ignore", invalid="ignore"):
        z = noise * np.log(level / share) + 1 / (2 * noise)
    inside = share * stats.norm.sf(z - 1 / noise) - level * stats.norm.sf(z)
    return np.where(level > 0, inside, share - level)


def one_of(places: int, noise: float, epsilon: float) -> float:
    """delta of one of 2 or 3 places: the last one in closed form, the others integrated."""
    z = np.linspace(-9, 9 + 1 / noise, 4001 if places == 2 else 801)
    mass = stats.norm.pdf(z) * (z[1] - z[0])
    y = np.exp(z / noise - 1 / (2 * noise**2))
    known, weight = (y, mass) if places == 2 else (np.add.outer(y, y), np.outer(mass, mass))
    # E (1 - e^eps R)+ = 1 - e^eps + E (e^eps R - 1)+, and R = (known + Y) / t.
    remove, scale = math.exp(epsilon), math.exp(-epsilon)
    share = 1 / places
    removed = (weight * _call(share, remove - share * known, noise)).sum()
    added = (weight * _call(share, scale - share * known, noise)).sum() * remove + 1 - remove
    return float(max(removed, added))


@pytest.mark.parametrize("places", [2, 3])
@pytest.mark.parametrize("noise", [0.4, 1.0, 3.0])
def test_two_and_three_places_agree_with_integration(places: int, noise: float):
    event = events.random_allocation_gaussian(
        steps=places, participations=1, noise_multiplier=noise
    )
    mechanism = steps.of(event, ADD_REMOVE)
    assert mechanism is not None
    for at in (0.2, 1.0) if noise > 1 else (0.5, 3.0, 8.0):
        true = one_of(places, noise, at)
        found = delta_bound(mechanism, at, hint=max(true, 1e-12))
        # The integral is accurate to about nine digits.
        assert true * (1 - 1e-8) - 1e-13 <= found <= true * 1.01 + 1e-12


def test_the_integral_is_that_of_another_rule():
    def gap(z: float) -> float:
        y = math.exp(z - 0.5)
        return float(_call(np.array(0.5), np.array(math.e - 0.5 * y), 1.0)) * stats.norm.pdf(z)

    assert one_of(2, 1.0, 1.0) == pytest.approx(integrate.quad(gap, -9, 10, limit=400)[0], rel=1e-6)


def test_the_blocks_cover_all_steps_and_all_participations():
    for of, k in ((100, 7), (12, 12), (5, 1), (99, 50)):
        event = events.random_allocation_gaussian(steps=of, participations=k, noise_multiplier=1.0)
        found = steps.of(event, ADD_REMOVE)
        assert found is not None
        assert sum(step.count for step in found) == k
        places = [getattr(step, "places", 1) * step.count for step in found]
        assert sum(places) == of


def _check(noise: float, of: int, k: int, rounds: int, delta: float, seed: int) -> None:
    """Simulate the whole mechanism: delta at our epsilon is at most what was promised.

    The lower confidence bound is that of Maurer and Pontil 2009, which fails with probability 1e-6.
    """
    one = events.random_allocation_gaussian(steps=of, participations=k, noise_multiplier=noise)
    found = accountant.epsilon(events.repeated(one, rounds), delta=delta, adjacency=ADD_REMOVE)
    samples, deltas = 40_000, []
    for remove in (True, False):
        losses = monte_carlo.allocation_losses(
            steps=of, participations=k, noise_multiplier=noise, epochs=rounds, samples=samples,
            remove=remove, rng=np.random.default_rng([seed, remove]),
        )  # fmt: skip
        values = -np.expm1(np.minimum(found - losses, 0.0))
        log = math.log(2 / 1e-6)
        margin = math.sqrt(2 * values.var(ddof=1) * log / samples) + 7 * log / (3 * samples)
        assert values.mean() - margin <= delta
        deltas.append(values.mean() + margin)
    if k == 1:
        # One of t places is priced exactly; only several participations are bounded by blocks.
        assert max(deltas) >= 0.97 * delta


@pytest.mark.statistical
@pytest.mark.parametrize("setting", [(0.5, 8, 1, 2), (1.0, 12, 3, 1), (2.0, 5, 1, 6)])
def test_never_below_a_simulation_of_the_mechanism(setting):
    # Seed 0; two bounds each, so it fails for correct code with probability at most 1e-5.
    _check(*setting, delta=0.02, seed=0)


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("seed", range(50))
def test_never_below_a_simulation_in_50_random_settings(seed: int):
    # Seeds 0 to 49; 100 bounds that fail with probability 1e-6 each: 1e-4 in all.
    rng = np.random.default_rng([seed, 9])
    of = int(np.exp(rng.uniform(math.log(2), math.log(100))))
    k = int(rng.integers(1, max(2, min(of, 12))))
    noise = float(np.exp(rng.uniform(math.log(0.4), math.log(4.0))))
    _check(noise, of, k, int(rng.integers(1, 4)), float(10 ** rng.uniform(-2.5, -1)), seed)


def test_more_participations_cost_more_and_more_steps_or_noise_cost_less():
    by_k = [epsilon(1.0, 60, k, 1e-6) for k in (1, 2, 7, 30, 60)]
    assert by_k == sorted(by_k)
    by_steps = [epsilon(1.0, of, 4, 1e-6) for of in (4, 6, 40, 41, 1000)]
    assert by_steps == sorted(by_steps, reverse=True)
    by_noise = [epsilon(noise, 60, 4, 1e-6) for noise in (0.02, 0.3, 0.5, 1.0, 4.0, 1e3, 1e7)]
    assert by_noise == sorted(by_noise, reverse=True)


def test_with_hardly_any_noise_the_price_is_that_of_known_places():
    told = dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(0.03), 3)
    assert epsilon(0.03, 60, 3, 1e-6) == pytest.approx(
        accountant.epsilon(told, delta=1e-6, adjacency=ADD_REMOVE), rel=1e-3
    )


def test_cheaper_than_poisson_sampling_at_the_same_rate():
    step = events.poisson_users_gaussian(user_sampling_prob=0.1, noise_multiplier=1.0)
    poisson = accountant.epsilon(events.repeated(step, 100), delta=1e-6, adjacency=ADD_REMOVE)
    assert poisson > 8.0
    assert epsilon(1.0, 100, 10, 1e-6) <= 6.94


def test_calibrated_noise_meets_the_target_and_no_less_would():
    def event_of(noise: float) -> events.DpEvent:
        return events.random_allocation_gaussian(
            steps=200, participations=5, noise_multiplier=noise
        )

    noise = accountant.calibrate(event_of, target=2.0, delta=1e-6, adjacency=ADD_REMOVE)
    reached = accountant.epsilon(event_of(noise), delta=1e-6, adjacency=ADD_REMOVE)
    assert 1.998 < reached <= 2.0


def test_zero_out_is_add_remove_and_replace_has_no_price():
    event = events.random_allocation_gaussian(steps=50, participations=2, noise_multiplier=1.0)
    one, other = (
        accountant.epsilon(event, delta=1e-6, adjacency=adjacency)
        for adjacency in (ADD_REMOVE, Adjacency.ZERO_OUT)
    )
    assert one == other
    with pytest.raises(UnaccountedPlanError, match="replace"):
        accountant.epsilon(event, delta=1e-6, adjacency=Adjacency.REPLACE)


def test_balls_in_bins_are_one_place_with_the_noise_of_all_rounds():
    event = events.balls_in_bins_gaussian(bins=40, rounds=9, noise_multiplier=3.0)
    alone = events.random_allocation_gaussian(steps=40, participations=1, noise_multiplier=1.0)
    assert event == alone


def test_balanced_iteration_costs_less_than_a_bin_for_good():
    fresh = events.balanced_iteration_gaussian(round_length=40, rounds=9, noise_multiplier=3.0)
    for_good = events.balls_in_bins_gaussian(bins=40, rounds=9, noise_multiplier=3.0)
    one, other = (
        accountant.epsilon(event, delta=1e-6, adjacency=ADD_REMOVE) for event in (fresh, for_good)
    )
    assert one < other


@pytest.mark.parametrize(("of", "k"), [(10, 0), (10, 11), (0, 1)])
def test_impossible_participations_are_refused(of: int, k: int):
    with pytest.raises(InputError, match="participations"):
        events.random_allocation_gaussian(steps=of, participations=k, noise_multiplier=1.0)
    with pytest.raises(InputError, match="rounds"):
        events.balls_in_bins_gaussian(bins=3, rounds=0, noise_multiplier=1.0)
