"""Both directions count: a user who leaves and a user who joins, in the search and the certificate.

For sampled Gaussian steps the user who leaves is the worse case in every setting we have tried, so
no number of ours would show that the other direction had been forgotten. Here the two neighbours
are exchanged, so that "add" is the worse one: every epsilon must stay what it was.
"""

from __future__ import annotations

import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from oracles import binomial

from userdp.accounting import certificate, events, least_noise, prepared, search
from userdp.accounting.discretise import discretise, excess_of_spacing, tilted
from userdp.accounting.pair import Direction
from userdp.accounting.steps import Mixture
from userdp.units import Adjacency

DELTA = 1e-6
# In the direction of joining, 100 steps at rate 0.01 lose at most 100 log(1/0.99) = 1.005.
STEPS = [binomial(0.7, 1, 0.01, 100)]
RECORDS = [binomial(1.5, 4, 0.02, 30)]
OTHER = {Direction.ADD: Direction.REMOVE, Direction.REMOVE: Direction.ADD}


def exchange_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on "remove" in the search means what "add" meant, and the other way round."""
    largest_loss, capped = prepared.Prepared.largest_loss, prepared.Prepared.capped
    for name, changed in {
        "tilted": lambda loss, log_q, way, tilt: tilted(loss, log_q, OTHER[way], tilt),
        "excess_of_spacing": lambda loss, log_q, way, tilt, spacing: excess_of_spacing(
            loss, log_q, OTHER[way], tilt, spacing
        ),
        "discretise": lambda pair, quadrature, way, **focus: discretise(
            pair, quadrature, OTHER[way], **focus
        ),
    }.items():
        for module in (search, prepared):
            monkeypatch.setattr(module, name, changed, raising=False)
    monkeypatch.setattr(
        prepared.Prepared, "largest_loss", lambda self, way: largest_loss(self, OTHER[way])
    )
    monkeypatch.setattr(
        prepared.Prepared, "capped", lambda self, way, cap: capped(self, OTHER[way], cap)
    )


def epsilon_in(mechanism: list[Mixture], way: Direction, delta: float) -> float:
    """An upper bound on epsilon in one direction only."""
    steps = prepared.prepare(mechanism, delta)
    return search._epsilon_of(steps, way, delta, search.TOLERANCE)


def searched(mechanism: list[Mixture], noise: float) -> dict[str, float]:
    """Everything the search answers that takes the worse of both directions."""
    found = least_noise.least_noise(
        lambda sigma: [
            Mixture(noise=sigma, shifts=one.shifts, weights=one.weights, count=one.count)
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
    mechanism: list[Mixture], monkeypatch: pytest.MonkeyPatch
):
    ways = {way: epsilon_in(mechanism, way, DELTA) for way in Direction}
    assert ways[Direction.REMOVE] > 1.1 * ways[Direction.ADD], "too alike to tell them apart"
    before = searched(mechanism, 0.7)
    exchange_neighbours(monkeypatch)
    assert epsilon_in(mechanism, Direction.ADD, DELTA) == ways[Direction.REMOVE]
    assert searched(mechanism, 0.7) == pytest.approx(before, rel=1e-9)


@pytest.mark.parametrize("guess", list(Direction))
def test_epsilon_does_not_rest_on_the_guess_which_direction_is_worse(
    guess: Direction, monkeypatch: pytest.MonkeyPatch
):
    expected = max(epsilon_in(STEPS, way, DELTA) for way in Direction)
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


# More noise for records: `dp_accounting` is asked only where it is quick.
@pytest.mark.parametrize(("group", "noise"), [(1, 1.5), (4, 6.0)])
def test_exchanging_the_neighbours_does_not_change_the_certificate(
    group: int, noise: float, monkeypatch: pytest.MonkeyPatch
):
    step = events.poisson_records_gaussian(
        record_sampling_prob=0.02, group_size=group, noise_multiplier=noise
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
