"""Every sampler's price with Gaussian noise: never below the mechanism itself, computed directly.

The outputs of small mechanisms are densities on a grid of one or two dimensions: all coins are
summed over, and the other users pull in the directions that are worst. Their hockey-stick
divergence is integrated and compared with the delta that the price gives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from userdp.accounting import accountant
from userdp.errors import InputError, UnaccountedPlanError
from userdp.noise import Gaussian
from userdp.prices.table import FIXED_GRAPH, ONE_OWNER, PRESENT_OR_NOT, event_of, price_of
from userdp.sampling import (
    SAMPLERS,
    Allocation,
    BalancedIteration,
    BallsInBins,
    CappedPoissonUsers,
    CyclicPoissonRecords,
    CyclicPoissonUsers,
    MinSeparated,
    PoissonRecords,
    PoissonUsers,
    PublicNumbers,
    Sampler,
    Shuffled,
    ShuffledRecords,
    WithoutReplacement,
)
from userdp.statement import epsilon_text
from userdp.units import Adjacency

EVERYWHERE = tuple(Adjacency)
PRICED: dict[type[Sampler], tuple[Adjacency, ...]] = {
    PoissonUsers: ONE_OWNER,
    PoissonRecords: EVERYWHERE,
    CappedPoissonUsers: ONE_OWNER,
    WithoutReplacement: ONE_OWNER,
    CyclicPoissonUsers: ONE_OWNER,
    CyclicPoissonRecords: EVERYWHERE,
    MinSeparated: FIXED_GRAPH,
    BallsInBins: PRESENT_OR_NOT,
    BalancedIteration: PRESENT_OR_NOT,
    Allocation: PRESENT_OR_NOT,
}
UNPRICED = (Shuffled, ShuffledRecords)
SIGMA = 0.8
NOISE = Gaussian(noise_multiplier=SIGMA)
EPSILONS = [0.0, 0.3, 1.0, 2.0, 4.0]
GRID = np.linspace(-12, 12, 4801)


def test_every_sampler_is_priced_or_known_to_have_no_price() -> None:
    ours = {kind for kind in SAMPLERS if kind.__module__.startswith("userdp.")}
    assert ours == {*PRICED, *UNPRICED}


@pytest.mark.parametrize(("kind", "adjacency"), list(product(PRICED, Adjacency)))
def test_a_sampler_has_a_price_where_it_is_proven_and_nowhere_else(
    kind: type[Sampler], adjacency: Adjacency
) -> None:
    part = object.__new__(kind)
    if adjacency in PRICED[kind]:
        assert price_of(part, NOISE, adjacency)
    else:
        with pytest.raises(UnaccountedPlanError, match="has no accounting rule"):
            price_of(part, NOISE, adjacency)


def test_shuffled_batches_have_no_event() -> None:
    with pytest.raises(UnaccountedPlanError, match="Shuffled has no accounting rule"):
        event_of(
            Shuffled(cohort_size=2, num_users=9, group_size=1), NOISE, Adjacency.ADD_REMOVE, steps=3
        )


# ---- one step, in one dimension


def density(outcomes: dict[float, float]) -> np.ndarray:
    """Gaussian noise on a sum that has these values with these chances."""
    return sum(p * stats.norm.pdf(GRID, mean, SIGMA) for mean, p in outcomes.items())  # type: ignore[return-value]


def divergence(first: np.ndarray, second: np.ndarray, epsilon: float) -> float:
    """The hockey-stick divergence of two densities on the grid, of any number of dimensions."""
    cell = float(GRID[1] - GRID[0]) ** first.ndim
    return float(np.maximum(first - np.exp(epsilon) * second, 0).sum() * cell)


def cut(q: float, cap: int, places: int, *, user: float, others: float) -> dict[float, float]:
    """The law of the sum: all other places pull by `others`, the user by `user` when it is kept."""
    found: dict[float, float] = {}
    for drawn, p in enumerate(stats.binom.pmf(range(places), places - 1, q)):
        kept = q * min(1.0, cap / (drawn + 1))
        with_user = min(drawn, cap - 1) * others + user
        without = min(drawn, cap) * others
        for mean, chance in ((with_user, kept), (without, 1 - kept)):
            found[mean] = found.get(mean, 0.0) + p * chance
    return found


@functools.cache
def delta_of(sampler: Sampler, adjacency: Adjacency, steps: int) -> list[float]:
    event = event_of(sampler, NOISE, adjacency, steps=steps)
    return accountant.deltas(event, epsilons=EPSILONS, delta=1e-6, adjacency=adjacency)


CUT: list[tuple[Sampler, tuple[float, int, int]]] = [
    (CappedPoissonUsers(user_sampling_prob=0.3, cap=2, num_users=6, group_size=1), (0.3, 2, 6)),
    (CappedPoissonUsers(user_sampling_prob=0.1, cap=1, num_users=9, group_size=1), (0.1, 1, 9)),
    (CappedPoissonUsers(user_sampling_prob=1.0, cap=3, num_users=4, group_size=1), (1.0, 3, 4)),
    (WithoutReplacement(cohort_size=2, num_users=5, group_size=1), (1.0, 2, 5)),
    (WithoutReplacement(cohort_size=1, num_users=8, group_size=1), (1.0, 1, 8)),
]


@pytest.mark.parametrize(("sampler", "numbers"), CUT, ids=[str(sampler) for sampler, _ in CUT])
@pytest.mark.parametrize("others", [-1.0, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("adjacency", [Adjacency.ADD_REMOVE, Adjacency.REPLACE])
@pytest.mark.parametrize("steps", [1, 2])
def test_cohorts_of_fixed_places_cost_no_more_than_they_are_priced(
    sampler: Sampler,
    numbers: tuple[float, int, int],
    others: float,
    adjacency: Adjacency,
    steps: int,
) -> None:
    # An empty place is drawn and gives nothing. Another user pulls the other way.
    other = 0.0 if adjacency is Adjacency.ADD_REMOVE else -1.0
    one, two = (density(cut(*numbers, user=user, others=others)) for user in (1.0, other))
    if steps == 2:
        one, two = (np.outer(each[::8], each[::8]) * 64 for each in (one, two))
    for epsilon, stated in zip(EPSILONS, delta_of(sampler, adjacency, steps), strict=True):
        real = max(divergence(one, two, epsilon), divergence(two, one, epsilon))
        # The sum over the grid has a relative error of about 2e-6.
        assert real <= stated * (1 + 1e-5) + 1e-9


def test_a_cap_that_is_never_reached_costs_what_poisson_sampling_costs() -> None:
    capped = CappedPoissonUsers(user_sampling_prob=0.2, cap=50, num_users=50, group_size=1)
    plain = PoissonUsers(user_sampling_prob=0.2, group_size=1)
    assert delta_of(capped, Adjacency.ADD_REMOVE, 5) == pytest.approx(
        delta_of(plain, Adjacency.ADD_REMOVE, 5), rel=1e-6
    )


# ---- a turn of all parts, in two dimensions


@pytest.mark.parametrize("signs", [(1.0, 1.0), (1.0, -1.0)])
@pytest.mark.parametrize("adjacency", [Adjacency.FIXED_GRAPH_ZERO_OUT, Adjacency.REPLACE])
def test_rows_of_a_user_in_different_parts_cost_no_more_than_in_one(
    signs: tuple[float, float], adjacency: Adjacency
) -> None:
    """On a fixed graph every row is dealt by itself. Here the user's two rows are in two parts.

    Neighbours see one coin in each of two steps. The price is that of two coins in one step.
    """
    p = 0.3
    sampler = CyclicPoissonRecords(record_sampling_prob=p, parts=2, group_size=2)

    def both(scale: float) -> np.ndarray:
        moved = [{0.0: 1 - p, scale * sign: p} if scale else {0.0: 1.0} for sign in signs]
        lines = [density(outcomes)[::8] * 8 for outcomes in moved]
        return np.outer(*lines)

    one, two = both(1.0), both(0.0 if adjacency.fixed_graph else -1.0)
    for epsilon, stated in zip(EPSILONS, delta_of(sampler, adjacency, 2), strict=True):
        real = max(divergence(one, two, epsilon), divergence(two, one, epsilon))
        assert real <= stated * (1 + 1e-6) + 1e-9


def test_k_records_of_a_cyclic_user_are_priced_as_k_coins_and_not_as_one() -> None:
    def cost(group_size: int) -> float:
        sampler = CyclicPoissonRecords(record_sampling_prob=0.3, parts=3, group_size=group_size)
        event = event_of(sampler, NOISE, Adjacency.ADD_REMOVE, steps=9)
        return accountant.epsilon(event, delta=1e-5, adjacency=Adjacency.ADD_REMOVE)

    assert cost(4) > 1.5 * cost(2) > 2 * cost(1)


# ---- what the first steps cost


def cost_of(sampler: Sampler, steps: int, adjacency: Adjacency) -> float:
    event = event_of(sampler, Gaussian(noise_multiplier=2.0), adjacency, steps=steps)
    return accountant.epsilon(event, delta=1e-5, adjacency=adjacency)


BY_ROUNDS: dict[str, tuple[Callable[[], Sampler], int]] = {
    "cyclic": (lambda: CyclicPoissonUsers(user_sampling_prob=0.5, parts=4, group_size=1), 4),
    "balls in bins": (lambda: BallsInBins(bins=4, group_size=1), 4),
    "balanced": (lambda: BalancedIteration(round_length=4, group_size=1), 4),
}


@pytest.mark.parametrize("name", BY_ROUNDS)
def test_a_round_that_has_begun_is_priced_whole(name: str) -> None:
    make, length = BY_ROUNDS[name]
    costs = [cost_of(make(), steps, Adjacency.ADD_REMOVE) for steps in range(1, 2 * length + 2)]
    assert len(set(costs[:length])) == 1
    assert len(set(costs[length : 2 * length])) == 1
    assert costs[0] < costs[length] < costs[2 * length]


def test_an_allocation_costs_the_whole_run_from_its_first_step_on() -> None:
    sampler = Allocation(steps=12, participations=3, group_size=1)
    costs = {cost_of(sampler, steps, Adjacency.ADD_REMOVE) for steps in (1, 5, 12)}
    assert len(costs) == 1


@pytest.mark.parametrize(
    ("sampler", "rival"),
    [
        (
            Allocation(steps=100, participations=10, group_size=1),
            PoissonUsers(user_sampling_prob=0.1, group_size=1),
        ),
        (
            BalancedIteration(round_length=10, group_size=1),
            PoissonUsers(user_sampling_prob=0.1, group_size=1),
        ),
    ],
    ids=["allocation", "balanced"],
)
def test_taking_part_exactly_so_often_costs_less_than_on_average(
    sampler: Sampler, rival: Sampler
) -> None:
    noise: Any = Gaussian(noise_multiplier=1.0)
    first, second = (
        accountant.epsilon(
            event_of(each, noise, Adjacency.ADD_REMOVE, steps=100),
            delta=1e-6,
            adjacency=Adjacency.ADD_REMOVE,
        )
        for each in (sampler, rival)
    )
    assert first < second


def test_a_fixed_order_costs_its_participations_and_no_more_than_its_separation_allows() -> None:
    def cost(group_size: int, separation: int) -> float:
        sampler = MinSeparated(separation=separation, steps=12, group_size=group_size)
        return cost_of(sampler, 12, Adjacency.FIXED_GRAPH_ZERO_OUT)

    assert cost(3, 1) < cost(4, 1) < cost(12, 1)
    # Twelve steps have room for three participations that are four apart.
    assert cost(9, 4) == cost(3, 4)


def test_a_plan_of_another_length_than_was_dealt_for_is_refused() -> None:
    for sampler in (
        Allocation(steps=12, participations=3, group_size=1),
        MinSeparated(separation=2, steps=12, group_size=2),
    ):
        sampler.check_steps(12)
        with pytest.raises(InputError, match="11"):
            sampler.check_steps(11)
        sampler.over(11).check_steps(11)


@pytest.mark.parametrize(
    "sampler",
    [
        BallsInBins(bins=1, group_size=1),
        BalancedIteration(round_length=1, group_size=1),
        Allocation(steps=10, participations=10, group_size=1),
        WithoutReplacement(cohort_size=7, num_users=7, group_size=1),
        CappedPoissonUsers(user_sampling_prob=1.0, cap=9, num_users=7, group_size=1),
        CyclicPoissonUsers(user_sampling_prob=1.0, parts=1, group_size=1),
        CyclicPoissonRecords(record_sampling_prob=1.0, parts=1, group_size=1),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_where_everybody_is_in_every_step_all_samplers_cost_the_same(sampler: Sampler) -> None:
    everybody = PoissonUsers(user_sampling_prob=1.0, group_size=1)
    assert cost_of(sampler, 10, Adjacency.ADD_REMOVE) == pytest.approx(
        cost_of(everybody, 10, Adjacency.ADD_REMOVE), rel=1e-5
    )


# ---- the table of docs/sampling.md

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sampling.md"
USERS = PublicNumbers(
    num_users=10_000, num_records=40_000, expected_groups=100, group_size=4, steps=1_000
)
RECORDS = replace(USERS, expected_groups=400)
ON_THE_PAGE: dict[str, tuple[type[Sampler], PublicNumbers, dict[str, int]]] = {
    "`poisson`": (PoissonUsers, USERS, {}),
    "`allocation`, 10 of 1,000 steps": (Allocation, USERS, {}),
    "`balanced-iteration`, rounds of 100": (BalancedIteration, USERS, {}),
    "`capped-poisson`, cap 140": (CappedPoissonUsers, USERS, {"cap": 140}),
    "`cyclic-poisson`, 10 parts": (CyclicPoissonUsers, USERS, {"parts": 10}),
    "`without-replacement`": (WithoutReplacement, USERS, {}),
    "`balls-in-bins`, 100 bins": (BallsInBins, USERS, {}),
    "`poisson`, records": (PoissonRecords, RECORDS, {}),
    "`cyclic-poisson`, records, 10 parts": (CyclicPoissonRecords, RECORDS, {"parts": 10}),
    "`min-separated`, 10 times, 100 apart (fixed-graph)": (
        MinSeparated,
        replace(USERS, group_size=10),
        {"separation": 100},
    ),
}


@pytest.mark.slow
def test_the_page_shows_what_each_sampler_costs() -> None:
    text = PAGE.read_text().split("<!-- prices: begin -->")[1].split("<!-- prices: end -->")[0]
    lines = [line.strip("|").split("|") for line in text.strip().splitlines()[2:]]
    shown = {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}
    assert shown.keys() == ON_THE_PAGE.keys()
    for name, (kind, public, own) in ON_THE_PAGE.items():
        sampler = kind.configured(public, **own)
        graphs = FIXED_GRAPH if kind.is_ordered else (Adjacency.ADD_REMOVE, Adjacency.REPLACE)
        told = []
        for adjacency in graphs:
            if adjacency not in PRICED[kind]:
                told.append("")
                continue
            noise = Gaussian(noise_multiplier=1.0)
            event = event_of(sampler, noise, adjacency, steps=public.steps)
            told.append(epsilon_text(accountant.epsilon(event, delta=1e-6, adjacency=adjacency)))
        assert shown[name] == told, name
