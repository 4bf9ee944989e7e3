"""Events: how many of each part there are, and that a ledger gives back what it was given."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dp_accounting import dp_event

from userdp.accounting import events
from userdp.errors import InputError, LedgerError
from userdp.prices.paid import check_numbers

EVENTS = [
    events.poisson_users_gaussian(user_sampling_prob=0.1, noise_multiplier=2.0),
    events.poisson_records_gaussian(record_sampling_prob=0.1, group_size=3, noise_multiplier=2.0),
    events.capped_poisson_users_gaussian(
        user_sampling_prob=0.1, cap=5, num_users=20, noise_multiplier=2.0
    ),
    events.min_separated_gaussian(participations=4, noise_multiplier=2.0),
    events.cyclic_poisson_banded(user_sampling_prob=0.2, steps=10, bands=3, noise_multiplier=2.0),
    events.fixed_size_users_gaussian(num_users=20, cohort_size=2, noise_multiplier=2.0),
    events.random_allocation_gaussian(steps=20, participations=3, noise_multiplier=2.0),
    events.without_replacement_gaussian(num_users=20, cohort_size=2, noise_multiplier=2.0),
    events.balls_in_bins_gaussian(bins=20, rounds=4, noise_multiplier=2.0),
    events.balls_in_bins_banded(bins=8, gram=[3.0, 1.5, 0.25], noise_multiplier=2.0),
    events.balanced_iteration_gaussian(round_length=20, rounds=4, noise_multiplier=2.0),
    events.combined([dp_event.GaussianDpEvent(3.0), dp_event.GaussianDpEvent(2.0)]),
    dp_event.RepeatAndSelectDpEvent(dp_event.GaussianDpEvent(3.0), 10.0, 1.0),
    events.repeated(events.poisson_users_gaussian(user_sampling_prob=0.1, noise_multiplier=2.0), 7),
    events.repeated(
        events.poisson_records_gaussian(
            record_sampling_prob=0.1, group_size=4, noise_multiplier=2.0
        ),
        7,
    ),
    dp_event.NonPrivateDpEvent(),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_survive_the_ledger(event: events.DpEvent):
    assert events.from_json(json.loads(json.dumps(events.to_json(event)))) == event


def test_cyclic_poisson_takes_each_part_once_per_cycle():
    event = events.cyclic_poisson_banded(
        user_sampling_prob=0.2, steps=10, bands=3, noise_multiplier=2.0
    )
    assert event.count == 4


def test_balanced_iteration_pays_for_every_round():
    event = events.balanced_iteration_gaussian(round_length=20, rounds=4, noise_multiplier=2.0)
    assert event.count == 4


def test_ledger_cannot_name_an_event_we_do_not_know() -> None:
    with pytest.raises(LedgerError, match=r"os\.system.*price"):
        events.from_json({"type": "os.system", "command": "true"})


def test_probabilities_of_the_mixture_sum_to_one_even_when_they_underflow() -> None:
    event = events.poisson_records_gaussian(
        record_sampling_prob=1e-4, group_size=512, noise_multiplier=1.0
    )
    assert isinstance(event, dp_event.MixtureOfGaussiansDpEvent)
    assert sum(event.sampling_probs) == pytest.approx(1.0, abs=1e-12)
    assert min(event.sampling_probs) > 0
    assert len(event.sampling_probs) < 513


@pytest.mark.parametrize(
    "forged",
    [
        {"type": "RandomAllocationGaussianDpEvent", "steps": 9, "participations": 0},
        {"type": "RandomAllocationGaussianDpEvent", "steps": 9, "participations": 10},
        {"type": "WithoutReplacementGaussianDpEvent", "num_users": 9, "cohort_size": 0},
        {"type": "WithoutReplacementGaussianDpEvent", "num_users": 9, "cohort_size": 10},
        {"type": "BallsInBinsBandedDpEvent", "bins": 8, "gram": []},
        {"type": "BallsInBinsBandedDpEvent", "bins": 8, "gram": [0.0]},
        {"type": "BallsInBinsBandedDpEvent", "bins": 8, "gram": [1.0, -0.5]},
        {"type": "BallsInBinsBandedDpEvent", "bins": 8, "gram": [1.0, 1.5]},
        {"type": "BallsInBinsBandedDpEvent", "bins": 2, "gram": [1.0, 0.5, 0.5]},
    ],
    ids=str,
)
def test_an_event_that_no_mechanism_has_is_not_read(forged: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        events.from_json(forged | {"noise_multiplier": 1.0})


@pytest.mark.parametrize(
    "event",
    [
        events.random_allocation_gaussian(steps=9, participations=2, noise_multiplier=1.0),
        events.without_replacement_gaussian(num_users=9, cohort_size=2, noise_multiplier=1.0),
        events.balls_in_bins_banded(bins=8, gram=[1.0, 0.5], noise_multiplier=1.0),
    ],
    ids=lambda event: type(event).__name__,
)
def test_events_of_whole_runs_can_be_written_into_a_budget(event: events.DpEvent) -> None:
    written = json.loads(json.dumps(events.to_json(event)))
    check_numbers(written)
    assert events.from_json(written) == event
