"""The table of prices: what is in it, what it says of t steps, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest

from userdp.accounting import accountant, events
from userdp.errors import UnaccountedPlanError
from userdp.noise import Gaussian
from userdp.prices import independent
from userdp.prices import table as prices
from userdp.prices.table import each_step, event_of, price_of, set_price
from userdp.sampling import PoissonRecords, PoissonUsers, Sampler
from userdp.units import Adjacency

USERS = PoissonUsers(user_sampling_prob=0.1, group_size=4)
RECORDS = PoissonRecords(record_sampling_prob=0.1, group_size=4)
NOISE = Gaussian(noise_multiplier=2.0)


@pytest.fixture
def own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test puts into the table is gone after it."""
    monkeypatch.setattr(prices, "_PRICES", dict(prices._PRICES))


@pytest.mark.parametrize("sampler", [USERS, RECORDS], ids=["users", "records"])
def test_the_price_is_that_of_all_steps_together(sampler: Sampler) -> None:
    assert event_of(sampler, NOISE, Adjacency.ADD_REMOVE, steps=9).count == 9
    costs = [
        accountant.epsilon(
            event_of(sampler, NOISE, Adjacency.ADD_REMOVE, steps=steps),
            delta=1e-5,
            adjacency=Adjacency.ADD_REMOVE,
        )
        for steps in (1, 2, 9, 100)
    ]
    assert costs == sorted(set(costs))


@pytest.mark.parametrize("adjacency", Adjacency)
def test_user_sampling_has_a_price_where_a_record_has_one_owner(adjacency: Adjacency) -> None:
    if adjacency in prices.ONE_OWNER:
        assert event_of(USERS, NOISE, adjacency, steps=2)
    else:
        with pytest.raises(UnaccountedPlanError, match=r"\(PoissonUsers\) with noise 'gaussian'"):
            event_of(USERS, NOISE, adjacency, steps=2)
    assert event_of(RECORDS, NOISE, adjacency, steps=2)


def test_a_price_counts_the_parameters_of_the_parts_that_draw() -> None:
    def cost(sampler: Sampler, noise: Gaussian) -> float:
        event = event_of(sampler, noise, Adjacency.ADD_REMOVE, steps=10)
        return accountant.epsilon(event, delta=1e-5, adjacency=Adjacency.ADD_REMOVE)

    more_users = PoissonUsers(user_sampling_prob=0.2, group_size=4)
    more_records = PoissonRecords(record_sampling_prob=0.1, group_size=5)
    assert cost(more_users, NOISE) > cost(USERS, NOISE)
    assert cost(more_records, NOISE) > cost(RECORDS, NOISE)
    for sampler in (USERS, RECORDS):
        assert cost(sampler, Gaussian(noise_multiplier=1.0)) > cost(sampler, NOISE)


@pytest.mark.usefixtures("own_table")
@pytest.mark.parametrize("adjacency", prices.ONE_OWNER)
def test_a_price_that_is_there_cannot_be_replaced(adjacency: Adjacency) -> None:
    before = event_of(USERS, NOISE, adjacency, steps=9)
    cheap = each_step(lambda sampler, noise: events.poisson_users_gaussian(
        user_sampling_prob=1e-6, noise_multiplier=1e6
    ))  # fmt: skip
    with pytest.raises(UnaccountedPlanError, match="already"):
        set_price(PoissonUsers, Gaussian, (adjacency,), cheap)
    assert event_of(USERS, NOISE, adjacency, steps=9) == before


@dataclass(frozen=True, kw_only=True)
class OtherUsers(PoissonUsers):
    """Inherits the parameters of a priced sampler, and may draw as it likes."""


@dataclass(frozen=True, kw_only=True)
class OtherNoise(Gaussian):
    """Inherits the parameters of a priced noise."""


@pytest.mark.usefixtures("own_table")
def test_a_part_does_not_inherit_the_price_of_another() -> None:
    others = OtherUsers(user_sampling_prob=0.1, group_size=4), OtherNoise(noise_multiplier=2.0)
    for sampler, noise in product((USERS, others[0]), (NOISE, others[1])):
        if (sampler, noise) == (USERS, NOISE):
            continue
        with pytest.raises(UnaccountedPlanError, match="has no accounting rule"):
            price_of(sampler, noise, Adjacency.ADD_REMOVE)
    # Its own price serves it alone, and under the adjacency it was given for.
    set_price(OtherUsers, Gaussian, (Adjacency.ADD_REMOVE,), each_step(independent.step_of_users))
    assert event_of(others[0], NOISE, Adjacency.ADD_REMOVE, steps=3)
    with pytest.raises(UnaccountedPlanError, match="This sampler has a price with: no noise"):
        price_of(others[0], NOISE, Adjacency.ZERO_OUT)


@pytest.mark.usefixtures("own_table")
def test_a_price_sees_how_many_steps_are_asked_for() -> None:
    asked: list[int] = []

    def whole_run(sampler: Sampler, noise: Gaussian, steps: int) -> events.DpEvent:
        asked.append(steps)
        return events.repeated(independent.step_of_users(USERS, NOISE), steps + 1)

    set_price(OtherUsers, Gaussian, (Adjacency.ADD_REMOVE,), whole_run)
    other = OtherUsers(user_sampling_prob=0.1, group_size=4)
    assert event_of(other, NOISE, Adjacency.ADD_REMOVE, steps=7).count == 8
    assert asked == [7]


@pytest.mark.usefixtures("own_table")
def test_a_refused_price_leaves_nothing_in_the_table() -> None:
    set_price(OtherUsers, Gaussian, (Adjacency.ZERO_OUT,), each_step(independent.step_of_users))
    with pytest.raises(UnaccountedPlanError, match="already"):
        set_price(OtherUsers, Gaussian, prices.ONE_OWNER, each_step(independent.step_of_users))
    with pytest.raises(UnaccountedPlanError, match="has no accounting rule"):
        price_of(OtherUsers(user_sampling_prob=0.1, group_size=4), NOISE, Adjacency.ADD_REMOVE)
