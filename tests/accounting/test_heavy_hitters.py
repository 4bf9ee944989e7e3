"""Words above a noisy threshold: the noise, the threshold, and the price against other formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import privacy_loss_distribution
from scipy import stats

from userdp.accounting import accountant
from userdp.accounting.heavy_hitters import Votes, released_words
from userdp.errors import InputError
from userdp.prices.paid import Paid
from userdp.units import Adjacency


def rule(**changes: float) -> Votes:
    return Votes(
        **({"words_per_user": 20, "noise_multiplier": 3.0, "threshold_delta": 1e-7} | changes)  # type: ignore[arg-type]
    )


def gaussian_delta(epsilon: float, noise: float) -> float:
    """Balle and Wang 2018, Thm. 8: N(1, s^2) against N(0, s^2)."""
    first = stats.norm.cdf(1 / (2 * noise) - epsilon * noise)
    return float(first - math.exp(epsilon) * stats.norm.cdf(-1 / (2 * noise) - epsilon * noise))


@pytest.mark.parametrize("words_per_user", [1, 7, 400])
@pytest.mark.parametrize("epsilon", [0.3, 1.0, 4.0])
def test_a_user_with_shared_words_and_words_alone_costs_at_most_epsilon(
    epsilon: float, words_per_user: int
) -> None:
    # `alone` of the m words are nobody else's. With the user, they are released with the chance r
    # together, and without never. The other counts are moved by sqrt(m - alone) in all. So the
    # outputs are N(shift) x Bernoulli(r) and N(0) x nothing, whose divergence has a closed form.
    delta = 1e-5
    found = Votes.calibrated(
        words_per_user=words_per_user,
        epsilon=epsilon,
        delta=delta,
        adjacency=Adjacency.ADD_REMOVE,
    )
    for alone in {0, 1, words_per_user // 2, words_per_user}:
        chance = float(stats.norm.sf((found.threshold - 1) / found.noise_stddev))
        released = -math.expm1(alone * math.log1p(-chance))
        assert released <= found.threshold_delta
        shift = math.sqrt(words_per_user - alone)
        noise = found.noise_stddev / shift if shift else math.inf

        def curve(at: float, noise: float = noise) -> float:
            if math.isinf(noise):
                return max(0.0, 1 - math.exp(at))
            return gaussian_delta(at, noise)

        # Removing the user: released words alone count in full, and the rest is less likely by
        # 1 - r on the left. Adding the user: it is less likely on the right.
        less = math.log1p(-released)
        removed = released + (1 - released) * curve(epsilon - less)
        added = curve(epsilon + less)
        assert max(removed, added) <= delta


def test_the_threshold_is_no_higher_than_it_must_be() -> None:
    one = rule(threshold_delta=1e-3)
    chance = float(stats.norm.sf((one.threshold - 1) / one.noise_stddev))
    assert 1 - (1 - chance) ** 20 == pytest.approx(1e-3, rel=1e-6)


def test_the_price_is_that_of_an_independent_accountant() -> None:
    one = rule()
    ours = accountant.epsilon(one.event, delta=1e-5, adjacency=Adjacency.ADD_REMOVE)
    theirs = privacy_loss_distribution.from_gaussian_mechanism(
        3.0, value_discretization_interval=1e-5
    ).get_epsilon_for_delta(1e-5 - 1e-7)
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert math.isinf(accountant.epsilon(one.event, delta=1e-7, adjacency=Adjacency.ADD_REMOVE))


def test_a_run_pays_for_words_and_steps_together() -> None:
    paid = Paid(what="dictionary", event=rule().event)
    assert Paid.from_json(paid.to_json()) == paid
    steps = dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(6.0), 4)
    both = dp_event.ComposedDpEvent([paid.event, steps])
    # Four steps of noise 6 are one of noise 3: with the words, one of noise 3 / sqrt(2).
    wanted = dp_event.GaussianDpEvent(3 / math.sqrt(2))
    found, alone = (
        accountant.epsilon(event, delta=delta, adjacency=Adjacency.ADD_REMOVE)
        for event, delta in ((both, 1e-5), (wanted, 1e-5 - 1e-7))
    )
    assert found == pytest.approx(alone, rel=1e-5)


@pytest.mark.statistical
def test_words_of_one_user_alone_are_released_as_rarely_as_is_charged() -> None:
    # Seed 2, 20,000 looks, each with a chance of 0.02: 5 standard errors fail once in 10^6.
    one = rule(threshold_delta=0.02, words_per_user=4)
    rng = np.random.default_rng(2)
    votes = {"own": 1, "name": 1, "of": 1, "somebody": 1}
    looks = 20_000
    share = sum(bool(released_words(votes, one, rng=rng)) for _ in range(looks)) / looks
    assert abs(share - 0.02) < 5 * math.sqrt(0.02 * 0.98 / looks)


def test_every_count_gets_the_noise_that_is_charged() -> None:
    asked: list[tuple[float, int]] = []

    class Recorded:
        def normal(self, *, scale: float, size: int) -> np.ndarray:
            asked.append((scale, size))
            return np.zeros(size)

    one = rule(words_per_user=16, noise_multiplier=2.5)
    threshold = math.ceil(one.threshold)
    votes = {"a": threshold, "b": 0, "c": math.floor(one.threshold), "d": threshold + 9}
    assert released_words(votes, one, rng=Recorded()) == ["d", "a"]  # type: ignore[arg-type]
    # A word without a vote gets no noise: it can never be released.
    assert asked == [(2.5 * 4, 3)]


@pytest.mark.parametrize(
    "wrong",
    [{"words_per_user": 0}, {"noise_multiplier": 0.0}, {"threshold_delta": 0.0}],
    ids=str,
)
def test_numbers_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        rule(**wrong)
