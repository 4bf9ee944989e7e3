from __future__ import annotations

import json

import pytest
from dp_accounting import dp_event

from userdp.accounting import accountant, cache, certificate, events
from userdp.errors import LedgerError
from userdp.units import Adjacency

EVENTS = [
    events.poisson_users_gaussian(user_sampling_prob=0.1, noise_multiplier=2.0),
    events.poisson_records_gaussian(record_sampling_prob=0.1, group_size=3, noise_multiplier=2.0),
    events.capped_poisson_users_gaussian(
        user_sampling_prob=0.1, cap=5, num_users=20, noise_multiplier=2.0
    ),
    events.min_separated_gaussian(participations=4, noise_multiplier=2.0),
    events.cyclic_poisson_banded(user_sampling_prob=0.2, steps=10, bands=3, noise_multiplier=2.0),
    events.fixed_size_users_gaussian(num_users=20, cohort_size=2, noise_multiplier=2.0),
    events.combined([dp_event.GaussianDpEvent(3.0), dp_event.GaussianDpEvent(2.0)]),
    dp_event.RepeatAndSelectDpEvent(dp_event.GaussianDpEvent(3.0), 10.0, 1.0),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_survive_the_ledger(event: events.DpEvent):
    assert events.from_json(json.loads(json.dumps(events.to_json(event)))) == event


def test_unknown_event_types_are_refused():
    with pytest.raises(LedgerError, match="price"):
        events.from_json({"type": "os.system"})


def test_cyclic_poisson_takes_each_part_once_per_cycle():
    event = events.cyclic_poisson_banded(
        user_sampling_prob=0.2, steps=10, bands=3, noise_multiplier=2.0
    )
    assert event.count == 4


def test_cache_is_used_only_for_the_same_key(tmp_path, monkeypatch):
    monkeypatch.setenv("USERDP_CACHE", str(tmp_path))
    event = EVENTS[0]
    first = accountant.evaluate(event, delta=1e-3, adjacency=Adjacency.ADD_REMOVE)
    files = list(tmp_path.iterdir())
    assert len(files) == 1

    def fail() -> certificate.Evaluation:
        raise AssertionError("computed again")

    again = cache.remember(
        fail, event=event, delta=1e-3, adjacency="add-remove", versions=accountant.certified_by()
    )
    assert again == first
    with pytest.raises(AssertionError, match="computed again"):
        cache.remember(fail, event=event, delta=1e-3, adjacency="add-remove", versions="other")


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"key": "another", "value": {}}'])
def test_broken_cache_files_are_ignored(tmp_path, monkeypatch, content):
    monkeypatch.setenv("USERDP_CACHE", str(tmp_path))
    first = accountant.evaluate(EVENTS[0], delta=1e-3, adjacency=Adjacency.ADD_REMOVE)
    for file in tmp_path.iterdir():
        file.write_text(content)
    assert accountant.evaluate(EVENTS[0], delta=1e-3, adjacency=Adjacency.ADD_REMOVE) == first


def test_unwritable_cache_is_as_good_as_none(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("USERDP_CACHE", str(blocked / "below"))
    found = accountant.evaluate(EVENTS[0], delta=1e-3, adjacency=Adjacency.ADD_REMOVE)
    assert found.epsilon > 0
