"""Both directions count: a user who leaves and a user who joins, in the search and the certificate.

For sampled Gaussian steps the user who leaves is the worse case in every setting we have tried, so
no number of ours would show that the other direction had been forgotten. Here the two neighbours
are exchanged, so that "add" is the worse one: every epsilon must stay what it was.
"""

from __future__ import annotations

import math

import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from oracles import binomial

from userdp.accounting import certificate, events, search
from userdp.accounting.discretise import Direction, discretise, excess_of_spacing, tilted
from userdp.units import Adjacency

DELTA = 1e-6
# In the direction of joining, 100 steps at rate 0.01 lose at most 100 log(1/0.99) = 1.005.
STEPS = [binomial(0.7, 1, 0.01, 100)]
RECORDS = [binomial(1.5, 4, 0.02, 30)]
OTHER = {Direction.ADD: Direction.REMOVE, Direction.REMOVE: Direction.ADD}


def exchange_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on "remove" in the search means what "add" meant, and the other way round."""
    largest_loss = search._Prepared.largest_loss
    for name, changed in {
        "tilted": lambda quadrature, way, tilt: tilted(quadrature, OTHER[way], tilt),
        "excess_of_spacing": lambda quadrature, way, tilt, spacing: excess_of_spacing(
            quadrature, OTHER[way], tilt, spacing
        ),
        "discretise": lambda pair, quadrature, way, **focus: discretise(
            pair, quadrature, OTHER[way], **focus
        ),
    }.items():
        monkeypatch.setattr(search, name, changed)
    monkeypatch.setattr(
        search._Prepared, "largest_loss", lambda self, way: largest_loss(self, OTHER[way])
    )


def searched(mechanism: list[search.Mixture], noise: float) -> dict[str, float]:
    """Everything the search answers that takes the worse of both directions."""
    found = search.least_noise(
        lambda sigma: [
            search.Mixture(noise=sigma, shifts=one.shifts, weights=one.weights, count=one.count)
            for one in mechanism
        ],
        epsilon=3.0,
        delta=DELTA,
    )
    assert found is not None
    return {
        "epsilon": search.epsilon_bound(mechanism, DELTA),
        "delta": search.delta_bound(mechanism, 3.0, hint=DELTA),
        "renyi epsilon": search.renyi_epsilon(mechanism, DELTA),
        "noise": found.noise_multiplier,
        "interval": search.interval_for(mechanism, 3.0, DELTA, 1e-4)[0],
    }


@pytest.mark.parametrize("mechanism", [STEPS, RECORDS], ids=["users", "records"])
def test_exchanging_the_neighbours_changes_nothing_the_search_says(
    mechanism: list[search.Mixture], monkeypatch: pytest.MonkeyPatch
):
    ways = {way: search.epsilon_in(mechanism, way, DELTA) for way in Direction}
    assert ways[Direction.REMOVE] > 1.1 * ways[Direction.ADD], "too alike to tell them apart"
    before = searched(mechanism, 0.7)
    exchange_neighbours(monkeypatch)
    assert search.epsilon_in(mechanism, Direction.ADD, DELTA) == ways[Direction.REMOVE]
    assert searched(mechanism, 0.7) == pytest.approx(before, rel=1e-9)


@pytest.mark.parametrize("guess", list(Direction))
def test_epsilon_does_not_rest_on_the_guess_which_direction_is_worse(
    guess: Direction, monkeypatch: pytest.MonkeyPatch
):
    expected = max(search.epsilon_in(STEPS, way, DELTA) for way in Direction)
    monkeypatch.setattr(
        search, "_renyi_epsilon", lambda prepared, way, delta: 2.0 if way is guess else 1.0
    )
    assert search.epsilon_bound(STEPS, DELTA) == pytest.approx(expected, rel=1e-4)


class Exchanged(PLDAccountant):
    """`dp_accounting`'s accountant with the neighbours exchanged."""

    def compose(self, event, count=1):
        super().compose(event, count)
        whole = self._pld
        self._pld = PrivacyLossDistribution(whole._pmf_add, whole._pmf_remove)
        return self


@pytest.mark.parametrize("group", [1, 4])
def test_exchanging_the_neighbours_does_not_change_the_certificate(
    group: int, monkeypatch: pytest.MonkeyPatch
):
    step = events.poisson_records_gaussian(
        record_sampling_prob=0.02, group_size=group, noise_multiplier=1.5
    )
    event = events.repeated(step, 30)

    def evaluated() -> certificate.Evaluation:
        return certificate.evaluate(event, delta=DELTA, adjacency=Adjacency.ADD_REMOVE)

    before, curve = evaluated(), deltas(event)
    assert before.certified_by.startswith("dp_accounting")
    monkeypatch.setattr(certificate, "PLDAccountant", Exchanged)
    after = evaluated()
    assert after.certified_by.startswith("dp_accounting")
    assert after.epsilon == pytest.approx(before.epsilon, rel=1e-9)
    assert deltas(event) == pytest.approx(curve, rel=1e-9)


def deltas(event: events.DpEvent) -> list[float]:
    return certificate.deltas(event, epsilons=[0.5, 1.0], adjacency=Adjacency.ADD_REMOVE)


def test_replacing_a_user_chains_both_directions(monkeypatch: pytest.MonkeyPatch):
    event = events.poisson_records_gaussian(
        record_sampling_prob=0.02, group_size=4, noise_multiplier=1.5
    )
    found = certificate.evaluate(event, delta=DELTA, adjacency=Adjacency.REPLACE).epsilon
    steps = certificate.mixtures(event)
    assert steps is not None
    leaves = search.epsilon_in(steps, Direction.REMOVE, DELTA / 2)
    joins = search.epsilon_in(steps, Direction.ADD, DELTA / 2 * math.exp(-leaves))
    assert min(leaves, joins) > 0
    assert found == pytest.approx(leaves + joins, rel=1e-9)


def test_the_curve_of_replacing_a_user_chains_both_directions():
    step = events.poisson_records_gaussian(
        record_sampling_prob=0.02, group_size=4, noise_multiplier=1.5
    )
    event = events.repeated(step, 30)
    epsilons = [0.5, 1.0, 4.0, 1500.0]
    found = certificate.deltas(event, epsilons=epsilons, adjacency=Adjacency.REPLACE)
    steps = certificate.mixtures(event)
    assert steps is not None
    for epsilon, delta in zip(epsilons[:3], found, strict=False):
        one_way = search.delta_bound(steps, epsilon / 2, hint=1e-4)
        assert delta == pytest.approx(min(1.0, one_way * (1 + math.exp(epsilon / 2))), rel=0.02)
        told = certificate.evaluate(event, delta=min(delta, 0.5), adjacency=Adjacency.REPLACE)
        assert told.epsilon <= 1.5 * epsilon
    assert found[3] <= 1
