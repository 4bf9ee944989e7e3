"""Events and epsilon against numbers typed from elsewhere and against other libraries.

The oracles: `dp_accounting` called directly, numerical integration of the subsampled Gaussian,
Opacus' PRV accountant and `prv-accountant` where they are installed, and the project's golden file.
"""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant
from scipy.stats import norm

from shared import SHARED, needs_shared
from userdp.accounting import accountant, events
from userdp.errors import InputError, UnaccountedPlanError
from userdp.plan import calibrate
from userdp.sampling import PoissonRecords, PoissonUsers
from userdp.units import Adjacency

ADD_REMOVE = Adjacency.ADD_REMOVE


def uls(rate: float, noise: float, steps: int) -> events.DpEvent:
    return events.repeated(
        events.poisson_users_gaussian(user_sampling_prob=rate, noise_multiplier=noise), steps
    )


def els(rate: float, group: int, noise: float, steps: int) -> events.DpEvent:
    return events.repeated(
        events.poisson_records_gaussian(
            record_sampling_prob=rate, group_size=group, noise_multiplier=noise
        ),
        steps,
    )


def epsilon(event: events.DpEvent, delta: float, adjacency: Adjacency = ADD_REMOVE) -> float:
    return accountant.epsilon(event, delta=delta, adjacency=adjacency)


# Charles et al. 2024, Fig. 1: T = 2000, p = 0.01, delta = 1e-6, computed with dp_accounting's PLD.
FIGURE_1 = [
    (2.0, 1, 1.0350),
    (2.0, 16, 25.598),
    (1.0, 1, 2.9553),
    (4.0, 16, 9.9465),
]


@pytest.mark.parametrize(("noise", "group", "expected"), FIGURE_1)
def test_epsilon_of_charles_2024_figure_1(noise: float, group: int, expected: float) -> None:
    assert epsilon(els(0.01, group, noise, 2000), 1e-6) == pytest.approx(expected, rel=1e-3)


# Charles et al. 2024, Sec. 4: N = 256, T = 256, epsilon 1, delta = 1e-6.
SECTION_4 = [(0.25, 17.0030), (0.125, 8.58341), (0.0625, 4.39464)]


@needs_shared
def test_calibration_of_charles_2024_section_4_golden() -> None:
    golden = json.loads((SHARED / "golden" / "accounting.json").read_text())["c"]
    checked = 0
    for row in golden["rows"]:
        sampler = (
            PoissonUsers(user_sampling_prob=row["q"], group_size=row["G"])
            if row["kind"] == "ULS"
            else PoissonRecords(record_sampling_prob=row["p"], group_size=row["G"])
        )
        found = calibrate(
            sampler,
            steps=row["T"],
            epsilon=row["eps"],
            delta=row["delta"],
            adjacency=ADD_REMOVE,
        )
        assert found == pytest.approx(row["sigma"], rel=golden["rtol"])
        checked += 1
    assert checked >= 4


@pytest.mark.parametrize(("rate", "expected"), SECTION_4)
def test_calibration_of_charles_2024_section_4(rate: float, expected: float) -> None:
    found = calibrate(
        PoissonUsers(user_sampling_prob=rate, group_size=1),
        steps=256,
        epsilon=1.0,
        delta=1e-6,
        adjacency=ADD_REMOVE,
    )
    assert found == pytest.approx(expected, rel=1e-3)


def gaussian_delta(epsilon: float, noise: float) -> float:
    """Balle & Wang 2018, Thm. 8: the exact delta of one Gaussian release."""
    return norm.cdf(0.5 / noise - epsilon * noise) - math.exp(epsilon) * norm.cdf(
        -0.5 / noise - epsilon * noise
    )


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("steps", [1, 4])
def test_epsilon_without_sampling_is_the_analytic_gaussian(noise: float, steps: int) -> None:
    # T Gaussian steps are one with sigma / sqrt(T).
    found = epsilon(uls(1.0, noise, steps), 1e-5)
    effective = noise / math.sqrt(steps)
    assert gaussian_delta(found, effective) <= 1e-5
    assert gaussian_delta(found * 0.999 - 1e-4, effective) > 1e-5


def integrated_delta(epsilon: float, rate: float, noise: float) -> float:
    """The exact delta of one subsampled Gaussian step, by integration of the worse direction."""
    x = np.linspace(-12 * noise, 1 + 12 * noise, 2_000_001)
    without = norm.pdf(x, scale=noise)
    with_user = (1 - rate) * without + rate * norm.pdf(x, loc=1.0, scale=noise)
    grows = math.exp(epsilon)
    return max(
        np.trapezoid(np.maximum(0, with_user - grows * without), x),
        np.trapezoid(np.maximum(0, without - grows * with_user), x),
    )


@pytest.mark.parametrize(("rate", "noise"), [(0.1, 0.8), (0.5, 1.5), (0.01, 0.5), (0.9, 2.0)])
def test_epsilon_of_one_sampled_step_matches_numerical_integration(
    rate: float, noise: float
) -> None:
    found = epsilon(uls(rate, noise, 1), 1e-4)
    assert integrated_delta(found, rate, noise) <= 1e-4 * (1 + 1e-6)
    assert integrated_delta(found * 0.998, rate, noise) > 1e-4


def test_epsilon_of_record_sampling_matches_numerical_integration() -> None:
    # One step, G = 3: the user's records move the mean by Binomial(3, 0.2).
    rate, group, noise = 0.2, 3, 1.5
    found = epsilon(els(rate, group, noise, 1), 1e-4)
    x = np.linspace(-20, 24, 2_000_001)
    without = norm.pdf(x, scale=noise)
    weights = [math.comb(group, k) * rate**k * (1 - rate) ** (group - k) for k in range(group + 1)]
    with_user = sum(w * norm.pdf(x, loc=k, scale=noise) for k, w in enumerate(weights))

    def exact_delta(epsilon: float) -> float:
        grows = math.exp(epsilon)
        return max(
            np.trapezoid(np.maximum(0, with_user - grows * without), x),
            np.trapezoid(np.maximum(0, without - grows * with_user), x),
        )

    assert exact_delta(found) <= 1e-4 * (1 + 1e-6)
    assert exact_delta(found * 0.998) > 1e-4


def random_setting(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "rate": float(10 ** rng.uniform(-3, -0.3)),
        "noise": float(10 ** rng.uniform(-0.2, 1.0)),
        "steps": int(10 ** rng.uniform(0, 3)),
        "delta": float(10 ** rng.uniform(-9, -3)),
    }


def check_setting(setting: dict[str, Any]) -> None:
    event = uls(setting["rate"], setting["noise"], setting["steps"])
    delta = setting["delta"]
    found = epsilon(event, delta)
    assert found >= 0
    assert epsilon(event, delta) == found, "reading changed something"

    # Within 1% of dp_accounting's PLD, finely spaced where epsilon is small, and never below the
    # optimistic estimate of the same distribution.
    oracle = PLDAccountant(value_discretization_interval=1e-5 if found < 0.1 else 1e-4)
    oracle.compose(event)
    assert found == pytest.approx(oracle.get_epsilon(delta), rel=0.01, abs=2e-6)
    optimistic = privacy_loss_distribution.from_gaussian_mechanism(
        setting["noise"],
        sampling_prob=setting["rate"],
        pessimistic_estimate=False,
        value_discretization_interval=1e-3,
        use_connect_dots=False,
    ).self_compose(setting["steps"])
    assert found >= optimistic.get_epsilon_for_delta(delta) - 1e-12

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        moments = RdpAccountant()
        moments.compose(event)
        # The smallest epsilon told apart from zero is 1e-6.
        assert found <= moments.get_epsilon(delta) * (1 + 1e-6) + 2e-6

    # More noise, fewer steps, larger delta: never a larger epsilon, up to the bound's own 0.1%.
    slack = 1 + 2e-3
    less = uls(setting["rate"], 1.5 * setting["noise"], setting["steps"])
    assert epsilon(less, delta) <= found * slack
    assert epsilon(event, min(0.5, 10 * delta)) <= found * slack
    if setting["steps"] > 1:
        assert (
            epsilon(uls(setting["rate"], setting["noise"], setting["steps"] // 2), delta)
            <= found * slack
        )


@pytest.mark.parametrize("number", range(12))
def test_row_16_accountant_properties(number: int) -> None:
    check_setting(random_setting(np.random.default_rng([16, number])))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_row_16_accountant_properties_on_500_settings() -> None:
    for number in range(500):
        check_setting(random_setting(np.random.default_rng([1600, number])))


@pytest.mark.parametrize("number", range(8))
def test_row_16_calibrated_epsilon_is_at_most_the_target_and_close_to_it(number: int) -> None:
    rng = np.random.default_rng([17, number])
    rate, steps = float(10 ** rng.uniform(-3, -0.5)), int(10 ** rng.uniform(0, 3))
    target, delta = float(10 ** rng.uniform(-0.7, 1.2)), float(10 ** rng.uniform(-8, -4))
    noise = calibrate(
        PoissonUsers(user_sampling_prob=rate, group_size=1),
        steps=steps,
        epsilon=target,
        delta=delta,
        adjacency=ADD_REMOVE,
    )
    reached = epsilon(uls(rate, noise, steps), delta)
    assert reached <= target
    # Steep only where noise hardly matters; a little less noise misses the target.
    assert epsilon(uls(rate, noise * 0.995, steps), delta) > target


def test_epsilon_is_next_to_nothing_where_delta_alone_covers_everything() -> None:
    # The total variation of 9 such steps is below 9 * 0.004 * 0.12 = 0.0045 < delta: epsilon is 0.
    assert 0 <= epsilon(uls(0.0040908, 3.39512, 9), 0.0052443) <= 1e-5


def test_group_size_one_record_sampling_equals_user_sampling_epsilon() -> None:
    for rate, noise, steps in [(0.01, 2.0, 2000), (0.3, 1.0, 10)]:
        assert epsilon(els(rate, 1, noise, steps), 1e-6) == epsilon(uls(rate, noise, steps), 1e-6)


def test_mixture_of_one_record_costs_what_poisson_sampling_costs() -> None:
    # The same claim through the other of the two events.
    mixture = dp_event.SelfComposedDpEvent(
        dp_event.MixtureOfGaussiansDpEvent(2.0, [0.0, 1.0], [0.9, 0.1]), 20
    )
    assert epsilon(mixture, 1e-5) == pytest.approx(epsilon(uls(0.1, 2.0, 20), 1e-5), rel=1e-3)


def test_larger_groups_cost_more() -> None:
    costs = [epsilon(els(0.05, group, 4.0, 20), 1e-5) for group in (1, 2, 4, 8)]
    assert costs == sorted(costs)
    assert costs[0] < costs[-1] / 4


def test_zero_out_costs_what_add_remove_costs() -> None:
    for event in (uls(0.1, 1.5, 50), els(0.1, 3, 4.0, 5)):
        assert epsilon(event, 1e-5, Adjacency.ZERO_OUT) == pytest.approx(
            epsilon(event, 1e-5), rel=2e-3
        )


@pytest.mark.parametrize(("rate", "group", "noise"), [(0.2, 1, 1.5), (0.2, 3, 3.0), (1.0, 1, 2.0)])
def test_replacing_a_user_is_never_priced_below_the_worst_exchange(
    rate: float, group: int, noise: float
) -> None:
    # All of the user's records point one way, or all the other: Binomial(G, p) to either side.
    event = uls(rate, noise, 1) if group == 1 else els(rate, group, noise, 1)
    found = epsilon(event, 1e-4, Adjacency.REPLACE)
    x = np.linspace(-3 - 12 * noise, 3 + 12 * noise, 1_000_001)
    weights = [math.comb(group, k) * rate**k * (1 - rate) ** (group - k) for k in range(group + 1)]
    one, other = (
        sum(w * norm.pdf(x, loc=side * k, scale=noise) for k, w in enumerate(weights))
        for side in (1, -1)
    )
    assert np.trapezoid(np.maximum(0, one - math.exp(found) * other), x) <= 1e-4 * (1 + 1e-6)
    assert found > epsilon(event, 1e-4)


def test_event_the_accountant_cannot_price_is_refused() -> None:
    with pytest.raises(UnaccountedPlanError, match="cannot price"):
        epsilon(dp_event.UnsupportedDpEvent(), 1e-5)


@pytest.mark.parametrize("delta", [0.0, -1e-6, 1.0, 2.0, math.nan, math.inf])
def test_delta_must_be_a_probability(delta: float) -> None:
    with pytest.raises(InputError, match="delta"):
        epsilon(uls(0.1, 1.0, 1), delta)


def test_delta_too_small_to_compute_with_is_refused() -> None:
    with pytest.raises(InputError, match="smallest"):
        epsilon(uls(0.1, 1.0, 1), 1e-300)


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf])
def test_target_epsilon_must_be_positive_and_finite(target: float) -> None:
    with pytest.raises(InputError, match="epsilon"):
        calibrate(
            PoissonUsers(user_sampling_prob=0.1, group_size=1),
            steps=1,
            epsilon=target,
            delta=1e-5,
            adjacency=ADD_REMOVE,
        )


def test_unachievable_epsilon_names_the_nearest_feasible() -> None:
    # T steps at noise 1e8 are one at 1e8 / sqrt(T) = 100: epsilon about 0.04.
    with pytest.raises(InputError, match=r"out of reach.*gives no less than 0\.0\d+"):
        calibrate(
            PoissonUsers(user_sampling_prob=1.0, group_size=1),
            steps=10**12,
            epsilon=1e-3,
            delta=1e-6,
            adjacency=ADD_REMOVE,
        )


def test_epsilon_too_small_to_compute_with_is_refused() -> None:
    with pytest.raises(InputError, match="smallest"):
        calibrate(
            PoissonUsers(user_sampling_prob=0.1, group_size=1),
            steps=10,
            epsilon=1e-9,
            delta=1e-6,
            adjacency=ADD_REMOVE,
        )


def test_prv_accountant_agrees() -> None:
    prv = pytest.importorskip("prv_accountant", reason="an independent oracle, optional")
    for rate, noise, steps, delta in [(0.01, 1.0, 500, 1e-6), (0.1, 2.0, 100, 1e-5)]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mechanism = prv.PoissonSubsampledGaussianMechanism(
                sampling_probability=rate, noise_multiplier=noise
            )
            other = prv.PRVAccountant(
                prvs=[mechanism],
                max_self_compositions=[steps],
                eps_error=0.01,
                delta_error=delta / 1000,
            )
            low, _, high = other.compute_epsilon(delta, [steps])
        assert low <= epsilon(uls(rate, noise, steps), delta) <= high + 0.01


def test_opacus_prv_accountant_agrees() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opacus = pytest.importorskip("opacus.accountants", reason="an independent oracle, optional")
        other = opacus.PRVAccountant()
        other.history = [(1.2, 0.02, 400)]
        theirs = other.get_epsilon(1e-5)
    # Its default error is 0.01 in epsilon.
    assert epsilon(uls(0.02, 1.2, 400), 1e-5) == pytest.approx(theirs, abs=0.02)


# McMahan et al. 2018, Table 1: users, expected cohort, noise multiplier, steps, delta = N^-1.1.
MCMAHAN_TABLE_1 = [(1e5, 1e2, 1.0, 10, 0.98), (1e6, 1e3, 1.0, 100, 1.00)]


@pytest.mark.parametrize(("users", "cohort", "noise", "steps", "printed"), MCMAHAN_TABLE_1)
def test_epsilon_is_at_most_mcmahan_2018_table_1(
    users: float, cohort: float, noise: float, steps: int, printed: float
) -> None:
    found = epsilon(uls(cohort / users, noise, steps), users**-1.1)
    assert 0 < found <= printed
