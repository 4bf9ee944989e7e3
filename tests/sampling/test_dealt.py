"""Deals that are made once: remembered, bounded, and never mistaken for each other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from userdp.index import UserIndex
from userdp.sampling import BallsInBins, CyclicPoissonRecords, dealt
from userdp.streams import RunSecret, Streams


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    dealt._remembered.clear()
    yield
    dealt._remembered.clear()


def streams(seed: int) -> Streams:
    return RunSecret.fixed_for_tests(seed).streams("cohort")


def test_a_deal_is_made_once_a_run_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    honest = dealt.by_place
    monkeypatch.setattr(dealt, "by_place", lambda *a, **k: made.append(1) or honest(*a, **k))
    index, sampler = UserIndex.from_owners(range(50)), BallsInBins(bins=4, group_size=1)
    for step in range(20):
        sampler.draw(index, step, streams(1))
    assert len(made) == 1
    for seed in range(9):
        sampler.draw(index, 0, streams(seed))
    assert len(dealt._remembered) <= 2
    # The run that was dealt first is dealt again, alike.
    before = sampler.draw(index, 3, streams(1)).rows.tolist()
    dealt._remembered.clear()
    assert sampler.draw(index, 3, streams(1)).rows.tolist() == before


def test_another_run_another_size_and_other_bins_are_other_deals() -> None:
    few, many = UserIndex.from_owners(range(50)), UserIndex.from_owners(range(60))
    four, five = BallsInBins(bins=4, group_size=1), BallsInBins(bins=5, group_size=1)
    drawn = [
        tuple(sampler.draw(index, 0, streams(seed)).rows.tolist())
        for sampler in (four, five)
        for index in (few, many)
        for seed in (1, 2)
    ]
    assert len(set(drawn)) == len(drawn)


def test_rows_of_another_index_of_the_same_size_are_not_mistaken() -> None:
    # The same users and as many rows, owned otherwise: what is remembered of one is of no use for
    # the other.
    sampler = CyclicPoissonRecords(record_sampling_prob=1.0, parts=2, group_size=9)
    first = UserIndex.from_owners([0, 0, 0, 1])
    second = UserIndex.from_owners([0, 1, 1, 1])
    for step in range(4):
        for index, owners in ((first, [0, 0, 0, 1]), (second, [0, 1, 1, 1])):
            rows = sampler.draw(index, step, streams(3)).rows.tolist()
            users = {owners[row] for row in rows}
            # All rows of whoever's turn it is, and no others.
            assert rows == [row for row in range(4) if owners[row] in users]


def test_a_deal_does_not_show_who_is_where() -> None:
    assert repr(dealt.by_place(np.array([1, 0]), 2)) == "Dealt(<secret>)"


def test_a_round_has_a_deal_of_its_own() -> None:
    first, second = (
        dealt.one_place_each(streams(1), number, num_users=40, places=4) for number in (0, 1)
    )
    assert first.at(0).tolist() != second.at(0).tolist()
    assert sorted(np.concatenate([first.at(place) for place in range(4)]).tolist()) == list(
        range(40)
    )
