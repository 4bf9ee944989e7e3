"""What the library composed is used again for the same event, and for nothing else."""

from __future__ import annotations

import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from userdp.accounting import certificate, events
from userdp.units import Adjacency

DELTA = 1e-5


class Counted(PLDAccountant):
    """Notes everything that is composed."""

    composed: list[events.DpEvent]

    def compose(self, event, count=1):
        self.composed.append(event)
        return super().compose(event, count)


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[events.DpEvent]:
    Counted.composed = []
    # What was composed before this test, for one, is not known to this class.
    certificate._composed.cache_clear()
    monkeypatch.setattr(certificate, "PLDAccountant", Counted)
    return Counted.composed


def evaluated(event: events.DpEvent, delta: float = DELTA) -> certificate.Evaluation:
    return certificate.evaluate(event, delta=delta, adjacency=Adjacency.ADD_REMOVE)


def records(noise: float, rate: float = 0.02) -> events.DpEvent:
    """A mixture, which holds lists of numbers."""
    step = events.poisson_records_gaussian(
        record_sampling_prob=rate, group_size=4, noise_multiplier=noise
    )
    return events.repeated(step, 3)


def test_one_event_is_composed_once_and_its_epsilon_is_the_same(composed) -> None:
    first = evaluated(records(6.0))
    assert first.certified_by.startswith("dp_accounting")
    assert evaluated(records(6.0)) == first
    assert composed == [records(6.0)]
    certificate._composed.cache_clear()
    assert evaluated(records(6.0)) == first
    assert composed == [records(6.0), records(6.0)]


@pytest.mark.parametrize("other", [records(6.000000000000001), records(6.0, 0.020000000000000004)])
def test_events_that_differ_in_their_last_digit_are_composed_apart(composed, other) -> None:
    evaluated(records(6.0))
    evaluated(other)
    assert composed == [records(6.0), other]


def test_numbers_of_another_type_and_other_lists_are_other_events() -> None:
    def numbers(sensitivities):
        event = dp_event.MixtureOfGaussiansDpEvent(2.0, sensitivities, [0.5, 0.5])
        return certificate._numbers(event)

    assert numbers([0.0, 1.0]) == numbers([0.0, 1.0])
    assert hash(numbers([0.0, 1.0])) == hash(numbers([0.0, 1.0]))
    assert numbers([0.0, 1.0]) != numbers([0, 1])
    assert numbers([0.0, 1.0]) != numbers([0.0, 2.0])
    twice = dp_event.ComposedDpEvent([dp_event.GaussianDpEvent(1.0)] * 2)
    assert certificate._numbers(twice) != certificate._numbers(dp_event.GaussianDpEvent(1.0))


def test_the_library_is_asked_again_at_every_delta(composed) -> None:
    assert evaluated(records(6.0), 1e-5).epsilon < evaluated(records(6.0), 1e-7).epsilon


def test_another_accountant_is_asked_anew(composed, monkeypatch: pytest.MonkeyPatch) -> None:
    first = evaluated(records(6.0))
    monkeypatch.setattr(certificate, "PLDAccountant", PLDAccountant)
    assert evaluated(records(6.0)) == first
    assert len(composed) == 1
